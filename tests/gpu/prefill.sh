#!/usr/bin/env bash
# EXL3 at many rows on a GPU host in one call of some 60 s: times first, while nothing else is on the
# GPU, then the tests, then small shapes under compute-sanitizer. Needs nvcc, torch and pytest.
#   OUT=DIR COMMIT=ID [LIMIT=150] [EXLLAMAV3=WHEEL] bash tests/gpu/prefill.sh [bench] [tests] [sanitizer]
# With exllamav3's wheel it is measured in the same run (its build: 60 s of 16 cores, once), or by a
# library of it that SPARK_EXL3_PEER_MANY names.
set -uo pipefail
cd -- "$(dirname -- "$0")/../.." || exit
: "${OUT:?a folder for the results}" "${COMMIT:?the commit of this tree}"
LIMIT=${LIMIT:-150}
began=$SECONDS worst=0
export SPARK_EXL3_LIBRARY=${SPARK_EXL3_LIBRARY:-$PWD/overlay/build/exl3/_cuda.so}
export SPARK_EXL3_KERNELS=1 PYTHONUNBUFFERED=1
wanted=("${@:-bench tests sanitizer}")
part() { # NAME LEAST MOST command…: one part with its own limit, its words in OUT/NAME.log
    local name=$1 least=$2 most=$3 rest=$((LIMIT - (SECONDS - began))) rc
    shift 3
    [[ " build ${wanted[*]} " == *" $name "* ]] || return
    if ((rest < least)); then
        echo "$name: no time"
        worst=1
        return
    fi
    timeout -k 5 $((rest < most ? rest : most)) "$@" >"$OUT/$name.log" 2>&1
    rc=$?
    ((rc)) && worst=1
    ((rc)) && tail -n 30 "$OUT/$name.log" >>"$OUT/failed.log"
    echo "$name: $rc, after $((SECONDS - began)) s: $(tail -n 1 "$OUT/$name.log" | cut -c1-200)"
}
if [[ ! -e $SPARK_EXL3_LIBRARY ]]; then
    part build 5 90 python3 overlay/csrc/build_cuda.py "$SPARK_EXL3_LIBRARY"
fi
part bench 10 150 python3 overlay/benchmarks/exl3.py --prefill --commit "$COMMIT" --json "$OUT/prefill.json"
part tests 10 120 python3 -m pytest -q -m gpu -p no:cacheprovider -n 4 tests/gpu/test_exl3_prefill.py
part sanitizer 10 120 bash tests/gpu/exl3.sh --sanitize
exit $worst
