#!/usr/bin/env bash
# Live smoke test of a serving deployment: 17*19 contains 323, and the short form of the verb.
#   bash tests/test_smoke.sh [OPTIONS]  HOST, PORT, MODEL and VLLM_API_KEY from the environment
set -euo pipefail

exec "$(dirname -- "$0")/../start.sh" smoke --short --answer \
    --url "http://${HOST:-127.0.0.1}:${PORT:-8888}" \
    --model "${MODEL:-DeepSeek-v4.1-Flash-EXL3}" "$@"
