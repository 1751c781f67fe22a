"""Container image."""

from launcher.settings.setting import Setting

KEYS = (
    Setting(
        "IMAGE",
        "image",
        "word",
        "ghcr.io/miaai-lab/deepseek-v4.1-flash-exl3-2x-dgx-sparks:2.9bpw",
        "image of both ranks",
        shown=True,
    ),
    Setting(
        "BASE_IMAGE",
        "image",
        "word",
        "vllm/vllm-openai:v0.33.0",
        "what the image is built on; Python 3.12 without vLLM will do",
    ),
    Setting("BUILD", "image", "flag", "0", "build here, always", one_shot=True),
    Setting(
        "SKIP_BUILD",
        "image",
        "flag",
        "0",
        "keep an image whose recipe differs",
        one_shot=True,
    ),
    Setting("PULL", "image", "flag", "0", "pull again even if the recipe is equal", one_shot=True),
    Setting("SKIP_PULL", "image", "flag", "0", "do not ask the registry", one_shot=True),
    Setting(
        "SKIP_SHIP",
        "image",
        "flag",
        "0",
        "do not copy the image to the worker",
        one_shot=True,
    ),
    Setting(
        "SKIP_OVERLAY_VERIFY",
        "image",
        "flag",
        "0",
        "no self-check of the image on the GPUs",
        one_shot=True,
    ),
    Setting(
        "IMAGE_PLATFORM",
        "image",
        "word",
        "",
        "os/architecture; empty: as inspected",
        one_shot=True,
    ),
    Setting("GHCR_USER", "image", "word", "MiaAI-Lab", "account of the registry login"),
    Setting(
        "GHCR_TOKEN",
        "image",
        "text",
        "",
        "token of the registry login",
        one_shot=True,
        secret=True,
    ),
    Setting(
        "IMAGE_SHIP",
        "image",
        "choice",
        "rsync",
        "how the image reaches the worker",
        choices=("rsync", "stream", "auto"),
    ),
    Setting(
        "IMAGE_SHIP_DIR", "image", "path", "", "where the tar is staged; empty: in CACHE_ROOT", "04"
    ),
    Setting(
        "WORKER_IMAGE_SHIP_DIR", "image", "path", "/tmp", "where the tar lands on the worker", "04"
    ),
    Setting("IMAGE_SHIP_KEEP", "image", "flag", "0", "keep the staged tar"),
)
