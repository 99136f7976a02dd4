#!/usr/bin/env bash
# A tiny model learns two-digit addition by GRPO, on this machine, without a GPU and without a download of a model.
# Arguments are overrides of the configuration: scripts/quickstart.sh trainer.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh cpu
exec .venv/bin/python -m skyrl_train.entrypoints.main_base +experiment=quickstart "$@"
