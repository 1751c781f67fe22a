"""Asks a registry what an image is, before it is pulled: its manifest and config, some kilobytes.

Anonymous where that is enough, else as GHCR_USER with GHCR_TOKEN. The token goes to the registry's
own host alone, over HTTPS, in a header.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from launcher.image.reference import Reference
from launcher.image.stamp import LABEL
from launcher.settings.secret import Secret

SECONDS = 10.0  # for each answer
MOST = 8 << 20  # bytes of an answer
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
LOGIN_HOST = "ghcr.io"  # whose token GHCR_TOKEN is


class OutOfReach(Exception):
    """No answer, or one that is no registry's; the text says which."""


class Absent(Exception):
    """The registry has no such image, or not for this account, or not for this platform."""


@dataclass(frozen=True)
class Login:
    user: str
    token: Secret
    host: str = LOGIN_HOST


@dataclass(frozen=True)
class Remote:
    """``size``: bytes of the compressed layers; ``layers``: diff ids, as a daemon lists them."""

    stamp: str
    layers: tuple[str, ...]
    digest: str
    size: int


def ask(wanted: Reference, platform: str, login: Login | None = None) -> Remote:
    """Raises OutOfReach or Absent. ``platform`` is os/architecture[/variant]."""
    with contextlib.closing(_Registry(wanted, login)) as registry:
        found, digest = registry.manifest(wanted.tag)
        if "manifests" in found:
            chosen = _for(platform, found["manifests"])
            if chosen is None:
                raise Absent(f"it has none for {platform}")
            found, digest = registry.manifest(chosen)
        config = registry.blob(str(found["config"]["digest"]))
        labels = (config.get("config") or {}).get("Labels") or {}
        return Remote(
            stamp=str(labels.get(LABEL, "")),
            layers=tuple(map(str, (config.get("rootfs") or {}).get("diff_ids") or ())),
            digest=digest,
            size=sum(int(layer.get("size", 0)) for layer in found.get("layers") or ()),
        )


def _for(platform: str, listed: list[dict[str, Any]]) -> str | None:
    os_name, _, rest = platform.partition("/")
    architecture, _, variant = rest.partition("/")
    for each in listed:
        of = each.get("platform") or {}
        if (of.get("os"), of.get("architecture")) != (os_name, architecture):
            continue
        if not variant or of.get("variant", "") in ("", variant):
            return str(each["digest"])
    return None


class _Registry:
    def __init__(self, wanted: Reference, login: Login | None) -> None:
        self._wanted = wanted
        self._login = login if login is not None and login.host == wanted.host else None
        scheme = "http" if _loopback(wanted.host) else "https"  # as Docker has it
        self._base = f"{scheme}://{wanted.host}/v2/{wanted.repository}"
        self._session = requests.Session()
        self._session.trust_env = False  # no .netrc: only what was given is sent
        self._session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self._session.proxies = dict(requests.utils.get_environ_proxies(self._base))
        self._bearer = ""

    def close(self) -> None:
        self._session.close()

    def manifest(self, tag: str) -> tuple[dict[str, Any], str]:
        """A manifest or an index, and its digest."""
        accept = ", ".join((*INDEXES, *MANIFESTS))
        data = self._get(f"{self._base}/manifests/{tag}", accept)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if tag.startswith("sha256:") and tag != digest:
            raise OutOfReach(f"{self._wanted.host} answers {tag} with other bytes")
        found = _object(data)
        if "manifests" not in found and "digest" not in (found.get("config") or {}):
            raise OutOfReach(f"{self._wanted.host} has a manifest of a kind that is not known")
        return found, digest

    def blob(self, digest: str) -> dict[str, Any]:
        data = self._get(f"{self._base}/blobs/{digest}", "*/*")
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise OutOfReach(f"{self._wanted.host} answers {digest} with other bytes")
        return _object(data)

    def _get(self, url: str, accept: str) -> bytes:
        for last in (False, True):
            headers = {"Accept": accept}
            if self._bearer:
                headers["Authorization"] = f"Bearer {self._bearer}"
            status, answer, data = self._ask(url, headers)
            if status == 401 and not last:
                self._bearer = self._token(answer.get("WWW-Authenticate", ""))
                continue
            if status in (401, 403, 404):
                raise Absent(f"{self._wanted.host} answers {status}")
            if status != 200:
                raise OutOfReach(f"{self._wanted.host} answers {status}")
            return data
        raise AssertionError

    def _token(self, challenge: str) -> str:
        kind, _, rest = challenge.partition(" ")
        told = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        realm = told.get("realm", "")
        if kind.lower() != "bearer" or not realm:
            raise Absent(f"{self._wanted.host} wants a login of a kind that is not known")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not _loopback(parts.netloc):
            raise OutOfReach(f"{self._wanted.host} gives tokens without TLS, at {parts.netloc}")
        asked = {"scope": f"repository:{self._wanted.repository}:pull"}
        if told.get("service"):
            asked["service"] = told["service"]
        auth = None
        if self._login is not None and parts.netloc == self._login.host:
            auth = (self._login.user, self._login.token.reveal())
        status, _, data = self._ask(realm, {}, params=asked, auth=auth)
        if status != 200:
            raise Absent(f"{parts.netloc} gives no token for it ({status})")
        found = _object(data)
        return str(found.get("token") or found.get("access_token") or "")

    def _ask(self, url: str, headers: dict[str, str], **more: Any) -> tuple[int, Any, bytes]:
        try:
            # A redirect to another host (blobs lie in stores of others) loses the token.
            with self._session.get(
                url, headers=headers, timeout=SECONDS, stream=True, **more
            ) as answer:
                data = bytearray()
                for block in answer.iter_content(1 << 16):
                    data += block
                    if len(data) > MOST:
                        raise OutOfReach(f"{self._wanted.host} answers with more than {MOST} bytes")
                return answer.status_code, answer.headers, bytes(data)
        except requests.RequestException as error:
            raise OutOfReach(f"{self._wanted.host}: {_reason(error)}") from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OutOfReach("the answer is not a registry's")
    return found


def _loopback(netloc: str) -> bool:
    host = netloc.rpartition(":")[0] or netloc if netloc.count(":") == 1 else netloc
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.Timeout):
        return f"no answer within {SECONDS:g} s"
    if isinstance(error, requests.exceptions.SSLError):
        return "its certificate is not accepted"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy does not let it through"
    if isinstance(error, requests.ConnectionError):
        return "cannot be connected to"
    return type(error).__name__
