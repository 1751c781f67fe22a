#!/bin/sh
# Fetches the model files and starts nothing: ./start.sh download
set -eu
exec "$(dirname -- "$0")/start.sh" download "$@"
