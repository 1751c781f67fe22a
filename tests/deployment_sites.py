"""The two sites as tests see them: a rehearsal on this machine, a pair of Sparks."""

from __future__ import annotations

from launcher.deployment import Place, Site

API_PORT, MASTER_PORT = 8888, 29521


def rehearsal(model: str = "/r/checkpoint", engram: str = "/r/engram-src") -> Site:
    """Two processes on loopback, device cpu."""
    program = ("/r/engine/bin/python", "-m", "spark_overlay.serve")
    head = Place("local", "head", "127.0.0.1", "lo", model, engram, program)
    worker = Place("local", "worker", "127.0.0.1", "lo", model, engram, program)
    return Site("rehearsal", "cpu", head, worker, MASTER_PORT, "127.0.0.1", API_PORT, "/r/cache")


def pair() -> Site:
    """Two containers, device cuda."""
    inside = ("/model", "/engram-src", ("vllm",))
    head = Place("spark-1", "head", "10.0.0.1", "enp1s0f1np1", *inside, ("rocep1s0f1",), 3)
    worker = Place("spark-2", "worker", "10.0.0.2", "enp1s0f0np0", *inside, ("rocep1s0f0",), 4)
    return Site("pair", "cuda", head, worker, MASTER_PORT, "0.0.0.0", API_PORT, "/root/.cache")
