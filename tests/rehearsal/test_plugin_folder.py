"""The overlay as a folder that vLLM is shown by PYTHONPATH: nothing is installed beside vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.rehearsal, pytest.mark.usefixtures("vllm")]

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
#: Run with vLLM's own loader, as each of its processes runs it.
ASKED = """
import spark_overlay, vllm
from vllm.plugins import load_plugins_by_group
from vllm import ModelRegistry
print(spark_overlay.__file__)
print(*sorted(load_plugins_by_group("vllm.general_plugins")))
load_plugins_by_group("vllm.general_plugins")["spark_overlay"]()
print(ModelRegistry.models["DeepseekV41ForCausalLM"].module_name)
"""


def test_a_read_only_folder_and_pythonpath_are_enough(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(OVERLAY, source, ignore=shutil.ignore_patterns("*.so", "__pycache__", "build"))
    plugin = tmp_path / "plugin"
    # No compiler: the native parts are another test's.
    bare = {**os.environ, "CXX": "absent", "CUDA_HOME": "", "PATH": "/usr/bin:/bin"}
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--target", str(plugin), str(source)],
        env=bare, check=True, capture_output=True,
    )  # fmt: skip
    for path in (plugin, *plugin.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    environ = {**os.environ, "PYTHONPATH": str(plugin), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    where, plugins, model = done.stdout.splitlines()[-3:]
    assert Path(where).is_relative_to(plugin)
    assert "spark_overlay" in plugins.split() and model == "spark_overlay.model"
