#!/bin/sh
# The one door: finds Python, makes .venv from launcher/locks on first use, hands over.
#   ./start.sh --help
#   ./start.sh --prepare [dev]    only make .venv (with what the tests need) and print its Python
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
cd -- "$root"
# Variables that would lend another Python's modules to ours, or have every start compile them.
unset PYTHONPATH PYTHONHOME PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE

venv=.venv
log=logs/venv.log

fail() { # found, needed, do next
    printf 'ERROR\nfound:   %s\nneeded:  %s\ndo next: %s\n' "$1" "$2" "$3" >&2
    exit 1
}

# Nothing is made or removed anywhere but in a checkout that may be written.
[ -f launcher/locks/launcher.lock ] ||
    fail "no launcher/locks/launcher.lock in $root" 'the whole checkout beside start.sh' \
        'run start.sh where it was cloned, by its own path and not through a link'
[ -w . ] ||
    fail "$root cannot be written by $(id -un)" 'a checkout of your own' \
        'clone it into a folder of yours'

# Sets `python` to the first interpreter that is new enough and can make a venv.
find_python() {
    seen='' bare=''
    for python in python3 python3.11 python3.12 python3.13 python3.14; do
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        seen="$seen $python=$version"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            return 0
        fi
        bare=$version
    done
    if [ -n "$bare" ]; then
        fail "Python $bare without its venv module (ensurepip)" \
            'a Python >= 3.11 that can make a virtual environment' \
            "sudo apt-get install python$bare-venv, then run this again"
    fi
    [ -n "$seen" ] || seen=' no python3 at all'
    fail "on PATH:$seen" 'Python >= 3.11' \
        'install Python 3.11 or newer with its venv module, then run this again'
}

checksum() { sha256sum "$1" | cut -d ' ' -f 1; }

# A marker inside .venv holds the checksum of the lock it was made from, and is written last:
# an interrupted or outdated environment is made again.
is_made() { # group
    [ -x "$venv/bin/python" ] &&
        [ "$(cat "$venv/$1.lock.sha256" 2>/dev/null)" = "$(checksum "launcher/locks/$1.lock")" ]
}

install_lock() { # group
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
        --requirement "launcher/locks/$1.lock" >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        fail "launcher/locks/$1.lock could not be installed; log: $root/$log" \
            'the package registry of pip within reach' \
            'mend what the log names, then run this again; it starts afresh'
    fi
    checksum "launcher/locks/$1.lock" >"$venv/$1.lock.sha256.new"
    mv -- "$venv/$1.lock.sha256.new" "$venv/$1.lock.sha256"
}

make_venv() {
    find_python
    echo "making $venv with $python (once; log: $log)" >&2
    rm -rf -- "$venv"
    if ! "$python" -m venv "$venv" >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        fail "$python could not make $root/$venv; log: $root/$log" \
            'a working venv module and room on the disk' 'mend what the log names, then run again'
    fi
    install_lock launcher
}

prepare() { # groups
    is_made launcher && { [ "$#" -eq 0 ] || is_made "$1"; } && return 0
    mkdir -p logs
    # Two first runs at once: the second waits, then finds the work done.
    exec 9>logs/.venv.lock
    if command -v flock >/dev/null 2>&1; then flock 9; fi
    is_made launcher || make_venv
    if [ "$#" -gt 0 ] && ! is_made "$1"; then
        echo "adding launcher/locks/$1.lock to $venv (once; log: $log)" >&2
        install_lock "$1"
    fi
    exec 9>&-
}

if [ "${1-}" = --prepare ]; then
    shift
    case "$*" in
    '' | dev) ;;
    *) fail "--prepare $*" '--prepare or --prepare dev' 'run ./start.sh --help' ;;
    esac
    prepare "$@"
    echo "$root/$venv/bin/python"
    exit 0
fi

prepare
exec "$venv/bin/python" -m launcher "$@"
