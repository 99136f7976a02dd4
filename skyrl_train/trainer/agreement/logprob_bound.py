"""Bound on the difference between engines' and trainer's logprobs of a step, beyond which it is not trained; and a
warning about samples of older weights, to which it does not apply.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_train.algorithms.build import uses_rollout_logprobs
from skyrl_train.algorithms.objective import Objective
from skyrl_train.config.rl import LogprobDifferenceConfig
from skyrl_train.trainer.agreement.sync_check import rounding_bound
from skyrl_train.types import Group

log = logging.getLogger(__name__)

FAIL_FACTOR = 10
"""An update is refused at this many times the difference at which a step warns."""
EXPERTS_FACTOR = 2
"""Rounding in half precision moves a few tokens to other experts."""
CAUSES = (
    "Likely causes: an engine that holds other weights; truncated or penalized sampling, or another temperature than "
    "generator.sampling_params.temperature; tokens of another tokenizer or chat template; an engine that computes in a "
    "coarser dtype than generator.model_dtype (quantization, kv_cache_dtype)"
)


class LogprobsDiffer(RuntimeError):
    """Engine and trainer disagree about samples of the current weights. Nothing was trained on them."""


class LogprobBound:
    """Bounds on the mean |engine - trainer| logprob difference of a step, in nats."""

    def __init__(
        self, config: LogprobDifferenceConfig, dtype_name: str, *, tensor_float: bool, has_experts: bool
    ) -> None:
        """Args: dtype_name: the coarser dtype of trainer and engine; tensor_float: like SyncCheck."""
        factor = EXPERTS_FACTOR if has_experts and dtype_name != "float32" else 1
        rounding = factor * rounding_bound(dtype_name, tensor_float=tensor_float)
        self.warn = rounding if config.warn is None else config.warn
        self.fail = FAIL_FACTOR * self.warn if config.fail is None else config.fail
        self._dtype_name, self._has_warned = dtype_name, False

    def error(self, difference: float, policy_version: int) -> LogprobsDiffer:
        """The error to raise for an update that was refused."""
        return LogprobsDiffer(
            f"trainer.logprob_difference.fail is {self.fail:g}: the logprobs of engine and trainer differ by "
            f"{difference:.3g} nats in mean over the step's samples of version {policy_version} (expected in "
            f"{self._dtype_name}: up to {self.warn:g}). The step was not trained. {CAUSES}. Raise the key only if the "
            "cause is known"
        )

    def report(self, difference: float | None) -> None:
        """Warn once in a run if the difference is above the bound."""
        if difference is None or difference <= self.warn or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "trainer.logprob_difference.warn is %g: the logprobs of engine and trainer differ by %.3g nats in mean "
            "over the step's samples, which biases gradients; above %g the run ends. %s. Later steps do not warn "
            "again: see policy/rollout_train_logprobs_abs_diff_mean",
            self.warn,
            difference,
            self.fail,
            CAUSES,
        )


class StalenessWarning:
    """Warns once in a run if the objective trains samples of older weights as if the current policy had sampled them.

    Checks refuse this for streaming; a source or rollout of the user may return such samples all the same.
    """

    def __init__(self, objective: Objective, source: str) -> None:
        """Args: source: trainer.source."""
        self._objective, self._source, self._has_warned = objective, source, False

    def note(self, staleness: Tensor) -> None:
        """Args: staleness [T]: that of a step's tokens (`ExperienceBatch`)."""
        if self._has_warned or not bool((staleness > 0).any()) or uses_rollout_logprobs(self._objective):
            return
        self._has_warned = True
        remedy = (
            "If samples of generator.rollout are of older weights, set trainer.algorithm.corrections=[token_tis]; if "
            "not, have it return the policy_version of the engines' answers"
            if self._source == "on_policy"
            else "Set trainer.max_staleness to the number of steps that samples of trainer.source may be behind (the "
            "default of trainer.algorithm.corrections is then [token_tis])"
        )
        log.warning(
            "%.3g %% of the trained tokens of this step were sampled by weights up to %d policy versions older. "
            "Neither trainer.algorithm.policy_loss_type nor a correction accounts for this, so gradients are biased. "
            "%s. Later steps do not warn again",
            100 * float((staleness > 0).sum() / (staleness >= 0).sum()),
            int(staleness.max()),
            remedy,
        )


def is_compared(groups: Sequence[Group], policy_version: int) -> Tensor:
    """[B] bool: samples of which every token was sampled from the weights that are about to be trained.

    Others are not compared: the difference between two versions is learning, not an error.
    """
    return torch.tensor([sample.policy_version == policy_version for group in groups for sample in group.samples])


def compared_share(groups: Sequence[Group], policy_version: int) -> float:
    """Fraction of the trained tokens that are compared, 0 without trained tokens."""
    counts = [(int(sample.loss_mask.sum()), sample.policy_version) for group in groups for sample in group.samples]
    total = sum(count for count, _ in counts)
    return sum(count for count, version in counts if version == policy_version) / max(1, total)
