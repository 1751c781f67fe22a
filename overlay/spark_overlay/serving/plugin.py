"""Our endpoints inside vLLM's API server: the ``vllm.endpoint_plugins`` entry point.

Of vLLM's plug-in points this one needs no patch. Its routes replace the server's own of the same
path, by a written contract (vllm/plugins/endpoint_plugins/interface.py, the same in 0.32 and 0.33),
and a handler reaches the engine through EngineClient alone. A tokenizer mode could only change how
a prompt is rendered: the requests would still be checked, sampled, parsed and answered by vLLM's
own rules, and text that spells a special token would still become that token. A renderer would
have to follow vLLM's inner types, which change with each release.

vLLM loads such plugins only where VLLM_PLUGINS names them: VLLM_PLUGINS=spark_overlay. It swallows
what a factory raises and would then serve its own routes, so all that can fail is imported later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI

NAME = "spark_overlay"


class SparkEndpoints:
    """vLLM's EndpointPlugin."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from spark_overlay.serving.routes import Routes

        self._app = app
        self._routes = Routes(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Raises for a tokenizer or an engine that does not fit: the server must not start."""
        from spark_overlay.serving.door import Door
        from spark_overlay.serving.glue import make_api

        self._routes.api = make_api(engine_client, args)
        # Before vLLM's own middleware, which asks for keys; that stands by now.
        self._app.middleware_stack = Door(
            self._app.middleware_stack or self._app.build_middleware_stack()
        )
