"""Where the ranks meet: torch's TCPStore, listening on the master's address alone.

torch binds its store to every interface of the machine, whatever the init method names. The store
takes a socket that already listens, so rank 0 makes one on the address it was given.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any


def create_store(
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    use_libuv: bool = True,
) -> Any:
    """torch's ``_create_c10d_store`` for ranks that meet without an elastic agent."""
    from torch.distributed import TCPStore

    given = {"host_name": hostname, "port": port, "world_size": world_size, "timeout": timeout}
    if rank != 0:
        return TCPStore(**given, is_master=False, multi_tenant=True, use_libuv=use_libuv)
    if not use_libuv:
        raise ValueError("only torch's libuv store takes a socket that listens already")
    family, kind, protocol, _, address = socket.getaddrinfo(
        hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen()
    return TCPStore(
        **given,
        is_master=True,
        multi_tenant=True,
        use_libuv=True,
        master_listen_fd=listener.detach(),
    )
