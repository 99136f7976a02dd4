"""Problems that do not end a run at once, but make it end with an error."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)

WARN_AFTER = 3
"""Consecutive steps without an update before a warning."""
END_AFTER = 10
"""Consecutive steps without an update before the run ends: each used other rows with the same weights."""


CONSTANT_AFTER = 5
"""Consecutive steps whose rewards are all the same number before a warning."""
LARGE_NORM = 100.0
"""Gradient norm over the median of the last steps above which it is a warning."""
NORMS = 50
"""Steps of that median; a tenth of them is needed for one."""


class RunIncomplete(RuntimeError):
    """The run reached its end, but some of its work failed."""


class Problems:
    """Problems of a run, each logged once."""

    def __init__(self) -> None:
        self._noted: list[str] = []

    def note(self, problem: str | None) -> None:
        """Args: problem: a sentence, or None."""
        if problem is not None and problem not in self._noted:
            log.error("%s. The run will end with exit code 1", problem)
            self._noted.append(problem)

    def unwritten(self, what: str, error: Exception, *, is_last: bool, ends_early: bool) -> None:
        """Log a failed write; that of the last step makes the run incomplete, unless the run ends early."""
        if ends_early:
            log.error("%s could not be written: %s", what, error)
        elif not is_last:
            log.error("%s could not be written, the run continues: %s", what, error)
        else:
            self.note(f"{what}, the last one, could not be written: {error}")

    def require_none(self) -> None:
        """Raises: RunIncomplete with all problems."""
        if self._noted:
            raise RunIncomplete("the run is incomplete: " + "; ".join(self._noted))


class Anomalies:
    """Signs in the metrics that a run learns nothing or is about to diverge; each is a warning."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._reward, self._num_equal = math.nan, 0

    def note(self, step: int, metrics: Metrics) -> None:
        self._note_rewards(step, metrics)
        norm = metrics.get("policy/grad_norm", math.nan)
        if not math.isfinite(norm):
            return
        if len(self._norms) >= NORMS // 10 and norm > LARGE_NORM * (usual := median(self._norms)) > 0:
            log.warning(
                "policy/grad_norm of step %d is %.3g, %.0f times the median of the last %d steps (%.3g). It is clipped "
                "to trainer.policy.optimizer_config.max_grad_norm; if it stays large, lower lr, and read samples.jsonl",
                step, norm, norm / usual, len(self._norms), usual,
            )  # fmt: skip
        self._norms.append(norm)

    def _note_rewards(self, step: int, metrics: Metrics) -> None:
        if metrics.get("reward/zero_variance_share") != 1.0:
            self._num_equal = 0
            return
        reward = metrics["reward/avg_raw_reward"]
        self._num_equal = self._num_equal + 1 if reward == self._reward else 1
        self._reward = reward
        if self._num_equal == CONSTANT_AFTER:
            log.warning(
                "every reward of the last %d steps, up to step %d, was %g: nothing is learned. Check samples.jsonl: "
                "does the environment read the right column (reference), and do responses end before "
                "generator.sampling_params.max_generate_length?",
                CONSTANT_AFTER, step, reward,
            )  # fmt: skip


class SkippedUpdates:
    """Steps whose optimizer steps were all skipped because a gradient was not finite."""

    def __init__(self) -> None:
        self.resumed = False
        """Whether the run began with trained weights."""
        self._num_steps = self._num_skipped = self._in_a_row = 0
        self._skipping: set[str] = set()
        """Models whose last update skipped optimizer steps."""

    def count(self, step: int, metrics: Metrics) -> None:
        """Args: metrics: of this global step; ignored without optimizer steps."""
        for model in ("policy", "critic"):
            self._note_first(model, step, metrics)
        if not (num_updates := metrics.get("policy/num_optimizer_steps", 0.0)):
            return
        is_skipped = metrics["policy/num_skipped_steps"] >= num_updates
        self._num_steps += 1
        self._num_skipped += is_skipped
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        if self._in_a_row == WARN_AFTER:
            log.warning(
                "the updates of %d consecutive steps were skipped, because their gradients were not finite; the run "
                "ends after %d. Check policy/grad_norm, the loss, the model's weights, the learning rate and the data",
                WARN_AFTER,
                END_AFTER,
            )

    def _note_first(self, model: str, step: int, metrics: Metrics) -> None:
        """Warn of the first of consecutive updates with skipped optimizer steps."""
        if not (num_updates := metrics.get(f"{model}/num_optimizer_steps", 0.0)):
            return
        num_skipped = metrics[f"{model}/num_skipped_steps"]
        if num_skipped and model not in self._skipping:
            log.warning(
                "%s/grad_norm of step %d is not finite: %d of the step's %d optimizer steps had such a gradient and "
                "were skipped, without a change of weights or optimizer state. %s/num_skipped_steps counts the next "
                "ones. Check the loss, the learning rate and the data",
                model, step, num_skipped, num_updates, model,
            )  # fmt: skip
        (self._skipping.add if num_skipped else self._skipping.discard)(model)

    @property
    def is_all(self) -> bool:
        """Whether all updates of the run were skipped, and there was one."""
        return self._num_skipped == self._num_steps > 0 and not self.resumed

    @property
    def is_stuck(self) -> bool:
        """Whether the run must end: END_AFTER consecutive updates were skipped."""
        return self._in_a_row >= END_AFTER

    @property
    def problem(self) -> str | None:
        """Sentence for the end of the run, or None."""
        reason = "were skipped, because their gradients were not finite. Check the model's weights, the learning rate"
        if self.is_all:
            return f"the model was not trained: the updates of all {self._num_steps} steps {reason} and the data"
        if self.is_stuck:
            return f"training ended early: the updates of the last {self._in_a_row} steps {reason} and the data"
        return None


async def require_idle(models: Iterable[ModelGroup], error: Exception, timeout_s: float) -> None:
    """Raises: the error, unless all ranks respond within the timeout; those that did not fail may still write."""
    if isinstance(error, RemoteFailed):
        for model in models:
            if not await model.is_idle(timeout_s):
                raise error
