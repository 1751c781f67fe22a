"""The head fetches its weights from a hub of the rig's own network, and starts with them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import weights
from head_clone import HeadClone
from rig import USER, WORKER

pytestmark = pytest.mark.rig

PORT = 8555
START = 60.0
HUB = Path(__file__).resolve().parents[1] / "local_hub.py"
MODEL, ENGRAM = "owner/tiny-exl3", "owner/tiny-native"
AT, ASKED = "/srv/hub", "/srv/asked.txt"
SETTINGS: dict[str, str | None] = {
    "AUTO_DOWNLOAD": "1",
    "HF_MODEL_REPO": MODEL,
    "HF_ENGRAM_REPO": ENGRAM,
    "MODEL_HOST": "./from hub/model",
    "ENGRAM_DIR": "./from hub/engram",
    "CACHE_ROOT": "~/.cache/of-the-download",
}
ENV = {"HF_ENDPOINT": f"http://{WORKER.address}:{PORT}"}
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def fetching(clean: HeadClone) -> Iterator[HeadClone]:
    clean.env(SETTINGS)
    for repo, files in ((MODEL, weights.checkpoint()), (ENGRAM, weights.engram())):
        for name, data in files.items():
            clean.rig.worker.write(f"{AT}/{repo}/{name}", data)
    yield clean
    clean.env()
    clean.rig.head.run("rm", "-rf", f"{clean.at}/from hub", f"{USER.home}/.cache/of-the-download")
    clean.rig.worker.run("rm", "-rf", AT, ASKED)


@contextmanager
def hub(clone: HeadClone) -> Iterator[None]:
    words = ("--bind", WORKER.address, "--port", str(PORT), "--asked", ASKED)
    with clone.rig.worker.background("/usr/bin/python3", str(HUB), AT, *words, listens=PORT):
        yield


def asked(clone: HeadClone) -> list[str]:
    """Files whose bytes were asked for so far."""
    time.sleep(0.3)  # it is written ten times a second
    told = clone.rig.worker.run("cat", ASKED, check=False).out.splitlines()
    gets = [line.split()[1] for line in told if line.startswith("GET ") and "/resolve/" in line]
    return [path.rpartition("/")[2] for path in gets]


def file(clone: HeadClone, name: str) -> Path:
    return clone.root / "from hub" / "model" / name


def test_a_start_fetches_the_weights_and_serves_and_mends_only_what_is_bad(
    fetching: HeadClone,
) -> None:
    with hub(fetching):
        ran = fetching.start("download", env=ENV, timeout=START)
        assert ran.status == 0, ran.said
        for name, data in weights.checkpoint().items():
            assert file(fetching, name).read_bytes() == data
        assert "the weights are whole and right" in ran.said

        damaged = bytearray(file(fetching, SHARD).read_bytes())
        damaged[-1] ^= 1
        where = shlex.quote(f"{fetching.at}/from hub/model/{SHARD}")
        fetching.rig.head.run("sh", "-c", f"cat >{where}", stdin=damaged.decode("latin-1"))
        before = asked(fetching)
        ran = fetching.start(env=ENV, timeout=START)
        assert ran.status == 0, ran.said
        assert f"{SHARD} has the right size and other bytes" in ran.said
        assert asked(fetching)[len(before) :] == [SHARD]
        assert file(fetching, SHARD).read_bytes() == weights.checkpoint()[SHARD]

        # Beside the model that serves.
        ran = fetching.start("download", env=ENV)
        assert ran.status == 0, ran.said
        assert "what serves now goes on" in ran.said
        assert fetching.start("status").status == 0
    # The hub is gone, and nothing of it is needed.
    ran = fetching.start(env=ENV)
    assert ran.status == 0 and "nothing has changed" in ran.said, ran.said


def test_without_a_hub_what_is_missing_is_told_and_nothing_starts(fetching: HeadClone) -> None:
    ran = fetching.start(env=ENV, timeout=START)
    assert ran.status == 1
    assert "the hub could not be reached" in ran.said and MODEL in ran.said
    assert fetching.running() == set()
