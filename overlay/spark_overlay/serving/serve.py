"""``python -m spark_overlay.serving.serve serve MODEL ...``: vLLM's own ``serve``, head or
headless.

vLLM's console script asks for a distribution named "vllm", which its CPU build is not; this enters
one step later and takes the same arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spark_overlay import stacks
from spark_overlay.engram import early
from spark_overlay.serving import secret_env
from spark_overlay.serving.plugin import NAME


def parser() -> tuple[Any, Any]:
    """vLLM's argument parser with its ``serve`` command, and that command."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    root = FlexibleArgumentParser(prog="spark_overlay.serving.serve")
    command = ServeSubcommand()
    command.subparser_init(root.add_subparsers(dest="subparser", required=True))
    return root, command


def require_plugins(environ: Mapping[str, str]) -> None:
    """Raises SystemExit where vLLM would leave our endpoints out and serve its own instead."""
    named = environ.get("VLLM_PLUGINS", "")
    if NAME not in named.split(","):
        raise SystemExit(
            f"VLLM_PLUGINS is {named!r}; needed is {NAME} in it: without it vLLM loads none of the "
            f"overlay's endpoints. Set VLLM_PLUGINS={NAME}"
        )


def main(argv: Sequence[str]) -> None:
    stacks.install()  # a boot may hang before vLLM gets to load plugins
    secret_env.load(os.environ)
    require_plugins(os.environ)
    early.check(argv)
    root, command = parser()
    arguments = root.parse_args(list(argv))
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
