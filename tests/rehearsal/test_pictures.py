"""Images of a request, up to what vLLM's processor is given."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType

import pytest
from PIL import Image

from spark_overlay.rehearsal.tokenizer import IMAGE, tokenizer_json
from spark_overlay.serving.errors import ApiError
from spark_overlay.serving.pictures import pictures
from spark_overlay.serving.prompt import Asked, Prompts

pytestmark = pytest.mark.rehearsal


def png(width: int, height: int) -> str:
    held = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(json.dumps(tokenizer_json()), ["m"])


def asked(prompts: Prompts, *urls: str, text: str = "what is it?") -> Asked:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": text}, *parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return prompts.read(json.dumps(body).encode(), "chat")


def test_each_image_has_one_place_and_comes_in_order(prompts: Prompts) -> None:
    found = asked(prompts, png(640, 480), png(300, 900))
    assert found.ids.count(prompts.special[IMAGE]) == 2
    made = pictures(found.images)
    wide, high = made.images
    assert wide.mode == high.mode == "RGB"
    assert wide.width > wide.height and high.width < high.height


def test_text_that_spells_an_image_takes_no_images_place(prompts: Prompts) -> None:
    spelled = asked(prompts, png(64, 64), text=f"{IMAGE} and <｜image｜>")
    place = spelled.ids.index(prompts.special[IMAGE])
    assert spelled.ids.count(prompts.special[IMAGE]) == 1
    before = b"".join(prompts.pieces[i] for i in spelled.ids[:place]).decode()
    assert before.endswith(f"{IMAGE} and <｜image｜>\n\n")


def test_the_tokens_of_an_image_are_those_vllm_makes(vllm: ModuleType, prompts: Prompts) -> None:
    from vllm.models.deepseek_v41.common import mm_preprocess

    for width, height in ((640, 480), (300, 900), (64, 64), (1920, 1080)):
        made = pictures(asked(prompts, png(width, height)).images)
        assert 1 + made.more_tokens == tokens_by_vllm(mm_preprocess, made.images[0])


def tokens_by_vllm(module: ModuleType, image: Image.Image) -> int:
    """With the checkpoint's own vision settings, which are vLLM's defaults for this model."""
    shape = {"patch_size": 14, "downsample_ratio": 3, "max_n_token": 1024}
    made = module.load_image(image, **shape, min_pixels=295936, max_wh_ratio=None)
    return int(module.num_image_tokens(*made[3:]))


class _Counting(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_error(404)

    def log_message(self, *told: object) -> None:
        pass


@pytest.fixture
def local() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Counting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a.png"
    server.shutdown()
    server.server_close()


def test_nothing_is_fetched_from_this_machine(prompts: Prompts, local: str) -> None:
    with pytest.raises(ApiError) as refused:
        pictures(asked(prompts, local).images)
    assert refused.value.status == 400
    assert _Counting.asked == 0


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64," + base64.b64encode(b"no image").decode(),
        "data:image/png;base64,",
        png(8, 8)[:-20],
    ],
    ids=["no image", "nothing", "cut short"],
)
def test_what_is_no_image_is_the_requests_fault(prompts: Prompts, url: str) -> None:
    with pytest.raises(ApiError) as refused:
        pictures(asked(prompts, url).images)
    assert refused.value.status == 400 and refused.value.message
