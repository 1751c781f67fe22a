"""The two entry points by which vLLM finds the overlay. Both are cheap and may run many times."""

from __future__ import annotations

PLATFORM = "spark_overlay.cpu.platform.SparkCpuPlatform"
MODELS = {
    "DeepseekV41ForCausalLM": "spark_overlay.model:SparkDeepseekV41",
    "DSparkV41DraftModel": "spark_overlay.model:SparkDSparkDraft",
}


def platform() -> str | None:
    """``vllm.platform_plugins``: our CPU platform where vLLM would take its own, else nothing.

    Runs before vLLM decides whether Triton exists, so the interpreter is made known here.
    """
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    from spark_overlay.cpu import interpreter

    interpreter.announce_cpu_backend()
    return PLATFORM


def register() -> None:
    """``vllm.general_plugins``: the exl3 quantization and the V4.1 models, by lazy names.

    Raises, in every process, for a vLLM that was not checked or a CPU without the interpreter.
    """
    from spark_overlay import stacks
    from spark_overlay.versions import require_supported

    stacks.install()
    require_supported()
    from vllm import ModelRegistry
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from spark_overlay.cpu import interpreter

        interpreter.require_interpreter()
        interpreter.mend()
    from spark_overlay import holding

    holding.start()
    from spark_overlay.hooks import EARLY

    for hook in EARLY:
        hook.check()
        hook.apply()
    from spark_overlay.exl3.config import Exl3Config

    register_quantization_config("exl3")(Exl3Config)
    for architecture, path in MODELS.items():
        ModelRegistry.register_model(architecture, path)
