#!/usr/bin/env bash
# Installs what the tests need and runs them. Arguments go to pytest (default: everything in tests/cpu):
# scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh cpu,dev
export OMP_NUM_THREADS=1
# Two files at a time: one file's processes leave a second core idle half of the time while they start. xdist would move
# files of few tests to the end, among them those that take minutes; tests/cpu/conftest.py puts these first.
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
