#!/bin/sh
# Watches this node's memory beside one server, and stops the server before memory runs out if the
# server took it. DSV41_MEM_GUARD=1 (.env, or else the environment) arms it; otherwise it watches.
#   scripts/memguard.sh CONTAINER [GIB [LOG [PIDFILE]]]
#   scripts/memguard.sh --help
# Python's standard library is all it needs. With DSV41_MEM_GUARD=1 ./start.sh starts one on each
# node by itself.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
exec env PYTHONPATH="$root" python3 -S -m launcher.watch.memguard "$@"
