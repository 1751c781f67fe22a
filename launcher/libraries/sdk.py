"""Docker's SDK. Its own ssh is paramiko's, half of what it would load; ours is in nodes.daemon.
Only a user whose DOCKER_HOST asks for its own gets that."""

from __future__ import annotations

import contextlib
import os

from launcher.libraries import without

_own = os.environ.get("DOCKER_HOST", "").strip().lower().startswith("ssh://")
with contextlib.nullcontext() if _own else without("paramiko"):
    import docker
    from docker.constants import DEFAULT_DOCKER_API_VERSION
    from docker.errors import APIError, DockerException, ImageNotFound, NotFound
    from docker.transport.basehttpadapter import BaseHTTPAdapter
    from docker.utils import version_lt

__all__ = [
    "DEFAULT_DOCKER_API_VERSION",
    "APIError",
    "BaseHTTPAdapter",
    "DockerException",
    "ImageNotFound",
    "NotFound",
    "docker",
    "version_lt",
]
