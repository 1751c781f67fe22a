#!/usr/bin/env bash
# Live smoke test of a serving deployment: 17*19 contains 323.
#   bash tests/test_smoke.sh            HOST, PORT, MODEL and VLLM_API_KEY from the environment
set -euo pipefail

host=${HOST:-127.0.0.1}
port=${PORT:-8888}
model=${MODEL:-DeepSeek-v4.1-Flash-EXL3}
body=$(
    MODEL=$model python3 -c '
import json, os
print(json.dumps({
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "What is 17*19? Reply with the integer only."}],
    "max_tokens": 32,
    "temperature": 0,
    "chat_template_kwargs": {"enable_thinking": False},
}))'
)

# The key goes by standard input: it must not stand in the process list.
answer=$(
    printf '%s' "${VLLM_API_KEY:+header = \"Authorization: Bearer ${VLLM_API_KEY}\"}" |
        curl -sS --fail-with-body --max-time 300 --noproxy '*' --config - \
            -H 'Content-Type: application/json' --data "$body" \
            "http://$host:$port/v1/chat/completions"
)
text=$(
    printf '%s' "$answer" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
)
case $text in
*323*) echo "smoke: 17*19 was answered with $text" ;;
*)
    echo "smoke: 17*19 was answered with: $text" >&2
    exit 1
    ;;
esac
