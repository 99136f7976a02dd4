"""A policy that can begin anew, for runs that share processes (lib/shared_runs.py)."""

from __future__ import annotations

from skyrl_train.algorithms.objective import Objective
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.residency.memory import torch_optimizers


class RenewedPolicy(MegatronPolicy):
    """The policy on one rank, with another objective for each run."""

    def begin(self, objective: Objective, folder: str) -> None:
        """Like a new policy with this objective. Args: folder: `save_state` of the initial model."""
        self._objective = objective
        for part in torch_optimizers(self._optimizer):
            part.state.clear()  # the initial state has no moments, and loading it would keep those of the last run
            for group in part.param_groups:
                group.pop("step", None)
        self.load_state(folder, 0)
