#!/usr/bin/env bash
# A rank's share of a 4 GB set of shards into the GPU's memory: speed, memory, and every byte.
#   OUT=folder LIMIT=60 bash tests/gpu/w7l.sh        (FOLDER: on which drive, default /tmp)
# Needs torch; fio if it is there.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.."
OUT=${OUT:-$(mktemp -d)}
LIMIT=${LIMIT:-60}
FOLDER=${FOLDER:-/tmp}
df -T "$FOLDER" | tail -1 | tee "$OUT/drive.txt"
timeout "$LIMIT" python3 overlay/benchmarks/load.py --folder "$FOLDER" --gib 4 --device cuda \
    --turns 2 --seconds 2 --direct-only --check-once --json "$OUT/load.json" >"$OUT/load.log" 2>&1
echo "load: rc $?"
cut -c1-600 "$OUT/load.log" | tail -20
rm -rf "$FOLDER"/load-benchmark-*
