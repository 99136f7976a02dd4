"""Comparison of the logprobs of engines and trainer on fixed samples, after a weight sync and before the first update.

Digests verify that the engine received the trainer's bytes; this verifies that it computes with them (the CPU build
repacks weights, and either side's code of the model may be wrong).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from skyrl_train.batching.build import build_experience
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import split
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.config.rl import VERIFYING_SAMPLES
from skyrl_train.types import Group, Sample, TrainBatch
from skyrl_train.weight_sync.control import SyncCheckFailed

log = logging.getLogger(__name__)

# Mean |difference| in nats on equal weights: 4e-7 in float32 on CPUs and GPUs; 5e-4 where vLLM's attention computes
# float32 in TensorFloat-32, its default. One optimizer step of the quickstart moves it by 1e-2.
# FP8 engines of tiny random models, the worst case: 9e-2, and 1.06 with other weights.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2, "fp8": 0.2}
TENSOR_FLOAT_BOUND = 3e-3


Scores = Mapping[str, Sequence[Sequence[float]]]
"""Engine -> logprobs of each sample."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The trainer's logprobs of the fixed samples."""

    batch: TrainBatch
    logprobs: torch.Tensor
    """[T] float32"""
    policy_version: int


def rounding_bound(dtype_name: str, *, tensor_float: bool) -> float:
    """Largest mean |difference| in nats on equal weights. Args: like SyncCheck."""
    return TENSOR_FLOAT_BOUND if tensor_float and dtype_name == "float32" else BOUNDS[dtype_name]


class SyncCheck:
    """Compares logprobs before the first update, at the first and at each Nth sync."""

    def __init__(
        self, every: int, dtype_name: str, limits: MicroBatchLimits, *, tensor_float: bool, max_tokens: int
    ) -> None:
        """Args: every: 0 means never; dtype_name: the coarser dtype of trainer and engine; limits: the policy's;
        tensor_float: whether an engine's float32 may be TensorFloat-32; max_tokens: of a sample that engines take.
        """
        self._every, self._limits, self._max_tokens = every, limits, max_tokens
        self._bound = rounding_bound(dtype_name, tensor_float=tensor_float)
        self._batch: TrainBatch | None = None
        self.has_compared = False
        """Whether any engine was compared since this process started."""

    def is_due(self, sync: int) -> bool:
        """Syncs count from 1."""
        return self._every > 0 and (sync == 1 or sync % self._every == 0)

    def has_samples(self, groups: Sequence[Group]) -> bool:
        """Whether there are samples to compare on, these or those of an earlier call."""
        return self._batch is not None or bool(self._scorable(groups))

    async def expect(self, policy: PolicyGroup, groups: Sequence[Group]) -> Expected:
        """The trainer's logprobs of the samples of the first call."""
        batch = self._samples(groups)
        return Expected(batch, await policy.prompt_logprobs(batch), policy.policy_version)

    async def compare(self, engines: EnginePool, expected: Expected) -> None:
        """Raises: SyncCheckFailed."""
        self.judge(expected, await _scores(engines, expected.batch), "after the sync")

    async def scores(self, engines: EnginePool, groups: Sequence[Group]) -> Scores | None:
        """The engines' logprobs of the samples of the first call, for `judge`; None if checks are off."""
        return await _scores(engines, self._samples(groups)) if self._every > 0 and self.has_samples(groups) else None

    def judge(self, expected: Expected, scores: Scores, when: str) -> None:
        """Raises: SyncCheckFailed."""
        self.has_compared = True
        for name, logprobs in scores.items():
            served = torch.cat([torch.tensor(values, dtype=torch.float32) for values in logprobs])
            difference = float((served - expected.logprobs).abs().mean())
            if not difference <= self._bound:
                raise SyncCheckFailed(
                    f"{when} of version {expected.policy_version} {name} computes logprobs that differ "
                    f"from the trainer's by {difference:.3g} nats in mean on {len(logprobs)} fixed samples; at most "
                    f"{self._bound:g} is rounding. The engine does not hold the trained weights (or the model's code "
                    "differs, or float32 is rounded by TRITON_F32_DEFAULT or VLLM_FLOAT32_MATMUL_PRECISION); "
                    "trainer.verify_sync_every=0 would hide this"
                )

    def _samples(self, groups: Sequence[Group]) -> TrainBatch:
        if self._batch is None:
            self._batch = batch_of(self._scorable(groups), self._limits)
        return self._batch

    def _scorable(self, groups: Sequence[Group]) -> list[Group]:
        """Groups whose first sample an engine can score; a service's clients may submit longer ones."""
        return [group for group in groups if len(group.samples[0].token_ids) <= self._max_tokens]


class FirstCheck:
    """The comparison before the first update of a process, when no sync has been compared yet.

    Scores the first samples with every engine while engines are awake, and with the trainer once it is loaded.
    """

    def __init__(self, check: SyncCheck, policy: PolicyGroup, engines: EnginePool) -> None:
        self._check, self._policy, self._engines = check, policy, engines

    async def scores(self, groups: Sequence[Group]) -> Scores | None:
        """First half: the engines must be able to generate. None once they were compared, and while none is up: a
        replacement is compared after its first sync.
        """
        if self._check.has_compared or not self._engines.updated:
            return None
        before = self._engines.num_changes
        try:
            return await self._check.scores(self._engines, groups)
        except RemoteFailed as error:
            await self._engines.drop_failed(error, before)
            log.warning("an engine failed before the first update and is compared after its first sync: %s", error)
            return None

    async def judge(self, scores: Scores | None, groups: Sequence[Group]) -> None:
        """Second half: the policy must be on its devices. Raises: SyncCheckFailed."""
        if scores is not None:
            expected = await self._check.expect(self._policy, groups)
            self._check.judge(expected, scores, "before the first update")


async def _scores(engines: EnginePool, batch: TrainBatch) -> Scores:
    bounds, token_ids = batch.cu_seqlens.tolist(), batch.token_ids
    return await engines.prompt_logprobs([token_ids[start:end].tolist() for start, end in pairwise(bounds)])


def batch_of(groups: Sequence[Group], limits: MicroBatchLimits) -> TrainBatch:
    """The first samples, one per group, in micro-batches that the policy's layout can run."""
    chosen = [replace(group, samples=(_scored(group.samples[0]),)) for group in groups[:VERIFYING_SAMPLES]]
    (batch,) = split(build_experience(chosen, policy_version=0), replace(limits, dp_size=1))
    return batch


def _scored(sample: Sample) -> Sample:
    """The sample as one conversation, without its last token: it may fill the engine's context, and vLLM scores a
    prompt only where one more token would fit.
    """
    length = max(1, len(sample.token_ids) - 1)
    return replace(
        sample,
        token_ids=sample.token_ids[:length],
        loss_mask=sample.loss_mask[:length],
        rollout_logprobs=sample.rollout_logprobs[:length],
        prompt_length=min(sample.prompt_length, length),
        rewards=sample.rewards[:length],
        ends_conversation=True,
    )
