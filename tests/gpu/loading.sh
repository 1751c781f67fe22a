#!/usr/bin/env bash
# A rank's share of a 4 GB set of shards into the GPU's memory: speed, memory, and every byte.
#   OUT=folder LIMIT=60 bash tests/gpu/loading.sh        (FOLDER: on which drive, default /tmp)
# Needs torch; fio if it is there. What time is left goes into other numbers of threads and sizes.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-60}
FOLDER=${FOLDER:-/tmp}
end=$((SECONDS + LIMIT))
df -T "$FOLDER" | tail -1 | tee "$OUT/drive.txt"
load() { # name, options…
    local name=$1
    shift
    local left=$((end - SECONDS))
    if ((left < 15)); then
        return
    fi
    timeout "$left" python3 overlay/benchmarks/load.py --folder "$FOLDER" --device cuda "$@" \
        --json "$OUT/$name.json" >"$OUT/$name.log" 2>&1
    echo "$name: rc $?"
    cut -c1-600 "$OUT/$name.log" | tail -10
    rm -rf "$FOLDER"/load-benchmark-*
}
load load --gib 4 --turns 2 --seconds 1 --direct-only --check-once
load sweep --gib 2 --turns 1 --seconds 1 --direct-only --check-once --sweep
