#!/usr/bin/env bash
# A rank's share of a 4 GB set of shards into the GPU's memory: speed, memory, and every byte.
#   OUT=folder LIMIT=100 COMMIT=id bash tests/gpu/loading.sh     (FOLDER: on which drive, default /tmp)
# Needs torch, 7 GB in FOLDER, and fio on PATH; without fio the baseline is our own reader, from end to
# end and past the page cache, and its row says so. OUT/load.json is whole after each turn.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-100}
FOLDER=${FOLDER:-/tmp}
mkdir -p "$OUT"
df -T "$FOLDER" | tail -1 | tee "$OUT/drive.txt"
timeout "$LIMIT" python3 -u overlay/benchmarks/load.py --folder "$FOLDER" --device cuda --gib 4 --turns 5 \
    --ways direct prepared --check-once --limit $((LIMIT - 5)) ${COMMIT:+--commit "$COMMIT"} \
    --json "$OUT/load.json" >"$OUT/load.log" 2>&1
rc=$?
rm -rf "$FOLDER"/load-benchmark-*
cut -c1-600 "$OUT/load.log" | tail -12
exit $rc
