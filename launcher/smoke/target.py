"""Which server the verb tries: the recorded deployment, or any other by its URL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher import health, standing
from launcher.app import App
from launcher.errors import LauncherError, UsageError
from launcher.http import Api
from launcher.smoke.server import Fault, Server


@dataclass(frozen=True)
class Target:
    server: Server
    log: Path | None  # of the rank that serves the API; None where it is not ours


def target(app: App, url: str | None, model: str | None, timeout: float) -> Target:
    """``timeout`` is in seconds for each request."""
    if url is not None:
        key = app.environ.get("VLLM_API_KEY", "")
        app.secrets.add(key)
        api = api_at(url, key)
        return Target(Server(api, model or _first(api, timeout), timeout), None)
    deployment = app.store.load().deployment
    if deployment is None:
        raise LauncherError(
            "no deployment is recorded in this checkout, and no --url was given",
            "a server to try",
            "./start.sh or ./start.sh rehearse first, or ./start.sh smoke --url http://HOST:PORT",
        )
    server = Server(standing.api(app, deployment), model or deployment.served_model_name, timeout)
    return Target(server, app.runtime(deployment.name).log_path("head"))


def api_at(url: str, key: str) -> Api:
    """Raises UsageError for what is no plain ``http://HOST:PORT``."""
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            "VLLM_API_KEY of the environment has characters that no HTTP header can carry",
            "printable ASCII",
            "export the key as the server was given it",
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        raise _refused("it is no URL") from None
    if parts.scheme == "https":
        raise _refused("it asks for https, and this speaks plain http only")
    if parts.scheme != "http" or not host:
        raise _refused("it is no http:// URL")
    if parts.username is not None:
        raise _refused("it holds a user name; a key goes in the environment as VLLM_API_KEY")
    if parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.fragment:
        raise _refused("it has more than a host and a port")
    return Api(host, 80 if port is None else port, key)


def _refused(why: str) -> UsageError:
    # Without the URL itself: it may hold a password.
    return UsageError(
        f"--url cannot be used: {why}",
        "http://HOST:PORT, as http://127.0.0.1:8888",
        "give that; for a server behind TLS, the address it listens on behind it, or a tunnel's",
    )


def _first(api: Api, timeout: float) -> str:
    """The first model that the server names."""
    try:
        names = health.model_names(Server(api, "", timeout).get("/v1/models"))
    except Fault as fault:
        raise LauncherError(
            f"{api.url} cannot be asked for its models: {fault.found}",
            fault.needed,
            "see that the server is up and look into its log; --model NAME does without the list",
        ) from fault
    if not names:
        raise LauncherError(
            f"{api.url}/v1/models names no model",
            "a model to ask",
            "see that the server is up and look into its log; --model NAME does without the list",
        )
    return names[0]
