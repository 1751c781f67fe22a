#!/usr/bin/env bash
# Remakes launcher/locks/engine.lock from engine.in, for every Linux machine and Python >= 3.11.
# Needs pip's package registry; uv is taken from PATH, or put into a folder of its own for this run.
set -euo pipefail
cd -- "$(dirname -- "$0")/../launcher/locks"

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

uv=$(command -v uv || true)
if [[ -z $uv ]]; then
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    uv=$work/venv/bin/uv
fi

# torch is installed on its own (launcher/steps/engine.py): here nothing may pull it in.
echo "torch ; sys_platform == 'never'" >"$work/override.txt"
"$uv" pip compile --universal --python-version 3.11 --quiet --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --no-config "$@" \
    --override "$work/override.txt" engine.in >"$work/all.lock"
grep -v -e "sys_platform == 'never'" -e '^triton==' "$work/all.lock" >"$work/engine.lock"
mv -- "$work/engine.lock" engine.lock
echo "engine.lock: $(wc -l <engine.lock) pins"
