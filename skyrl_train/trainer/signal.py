"""Whether a step has anything to learn from."""

from __future__ import annotations

import logging

from skyrl_train.algorithms.build import needs_advantages
from skyrl_train.algorithms.objective import Objective
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)


class Signal:
    """Detects steps whose gradient would be 0: all advantages are 0, and nothing else is in the objective.

    Such a step must not be trained: Adam's momentum and weight decay would move the weights all the same.
    """

    def __init__(self, objective: Objective, *, has_other_terms: bool) -> None:
        """Args: has_other_terms: whether a KL penalty in the reward or a load-balancing loss gives a gradient too."""
        self._is_always_there = has_other_terms or not needs_advantages(objective)
        self._was_missing = False

    def is_in(self, metrics: Metrics) -> bool:
        """Whether to update. Logs the first of several steps in a row without signal.

        Args: metrics: those of `experience_metrics`.
        """
        is_missing = not self._is_always_there and metrics["loss/avg_raw_advantages_abs"] == 0
        if is_missing and not self._was_missing:
            log.warning(
                "the step has no signal: the advantages of all trained tokens are 0 (%.0f %% of the groups have equal "
                "rewards), so it makes no update, no policy version and no weight sync. If this happens often, check "
                "the rewards and the difficulty of the prompts. Following steps without signal are not logged: their "
                "policy/num_optimizer_steps is 0",
                100 * metrics["reward/zero_variance_share"],
            )
        self._was_missing = is_missing
        return not is_missing
