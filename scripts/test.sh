#!/usr/bin/env bash
# Installs what the tests need and runs them. Arguments go to pytest (default: everything in tests/cpu):
# scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh cpu,dev
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
