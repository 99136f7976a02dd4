"""Scores on held-out prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from skyrl_train.cancellation import cancel
from skyrl_train.rollout.admission import Admission
from skyrl_train.rollout.collect import Collector, Progress, Silent
from skyrl_train.rollout.metrics import evaluation_metrics
from skyrl_train.rollout.shaping import zero_unfinished
from skyrl_train.types import Group, Metrics, Prompt, SamplingParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Responses to all held-out prompts."""

    groups: list[Group]
    """Without failed rollouts, and without prompts all of whose rollouts failed."""
    num_failed: int
    """Number of failed rollouts."""


@dataclass(frozen=True)
class Evaluation:
    """Samples responses to every held-out prompt, `batch_size` prompts in flight."""

    prompts: Sequence[Prompt]
    collector: Collector
    progress: Progress
    n_samples: int
    sampling_params: SamplingParams
    batch_size: int
    max_failed_share: float
    pass_threshold: float
    """A sample passes if its reward is above it."""
    zeroes_unfinished: bool = False
    """Whether conversations that did not end by themselves have reward 0, as in training."""
    keep: Callable[[int, Sequence[Group], int], object] = lambda step, groups, logged_at: None
    """keep(step, groups, logged_at) writes the samples."""

    async def run(self, seed: int, step: int) -> Metrics:
        """Return `eval/*`. Args: seed: determines the samples for given weights; step: of these weights."""
        return self.scored(step, await self.sample(seed, self.progress))

    def scored(self, step: int, sampled: Sampled, logged_at: int | None = None) -> Metrics:
        """`eval/*` of responses, which are kept. Args: step: of the weights that sampled them; logged_at: step with
        which they are logged, by default the same.
        """
        self.keep(step, sampled.groups, step if logged_at is None else logged_at)
        return self.metrics(sampled)

    def metrics(self, sampled: Sampled) -> Metrics:
        """`eval/*` of responses."""
        metrics = evaluation_metrics(sampled.groups, self.pass_threshold)
        if self.max_failed_share:
            metrics["eval/all/num_failed_rollouts"] = float(sampled.num_failed)
        return metrics

    async def sample(self, seed: int, progress: Progress) -> Sampled:
        """Generate responses to all held-out prompts. Args: seed: like `run`; progress: shows them."""
        groups: list[Group] = []
        params, admission = replace(self.sampling_params, seed=seed), Admission(self.max_failed_share, min_samples=1)
        admission.begin(len(self.prompts) * self.n_samples)
        for start in range(0, len(self.prompts), self.batch_size):
            batch = self.prompts[start : start + self.batch_size]
            groups += await self.collector.collect(batch, self.n_samples, params, progress, admission)
        if left_out := len(self.prompts) - len(groups):
            log.warning(
                "%d of %d held-out prompts have no score: all their rollouts failed", left_out, len(self.prompts)
            )
        groups = [zero_unfinished(group) for group in groups] if self.zeroes_unfinished else groups
        return Sampled(groups, len(admission.failures))


@dataclass(frozen=True, slots=True)
class _Running:
    task: asyncio.Task[Sampled]
    step: int
    version: int
    started_s: float


class EvaluationBeside:
    """An evaluation beside training, which continues: its requests share the engines with the rollouts, or have
    dedicated engines, whose weights are loaded before it begins and then stay.

    It holds nothing that rollouts wait for, so neither can block the other. On shared engines, weights that are
    published in the meantime answer what is left of it; the metrics say how much.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        policy_version: Callable[[], int],
        load_weights: Callable[[], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args: load_weights: awaited before an evaluation begins, while the policy's weights do not change; None for
        the engines of training, which have the newest.
        """
        self._evaluation, self._policy_version, self._clock = evaluation, policy_version, clock
        self._load_weights = load_weights
        self._running: _Running | None = None

    @property
    def step(self) -> int | None:
        """Step whose weights are evaluated; None while none runs."""
        return None if self._running is None else self._running.step

    async def begin(self, step: int, seed: int) -> None:
        """Start evaluating the weights of a step; skipped while another one runs. Raises: what `load_weights` does."""
        if self._running is not None:
            log.info("skipped the evaluation of step %d: that of step %d is still running", step, self._running.step)
            return
        if self._load_weights is not None:
            await self._load_weights()
        # Silent, because the console shows the progress of the training samples.
        task = asyncio.get_running_loop().create_task(self._evaluation.sample(seed, Silent()))
        self._running = _Running(task, step, self._policy_version(), self._clock())

    def ended(self, step: int) -> Metrics:
        """`eval/*` if it has ended, else nothing. Args: step: that has just been trained. Raises: its error."""
        running = self._running
        if running is None or not running.task.done():
            return {}
        self._running = None
        sampled = running.task.result()
        spans = [span for group in sampled.groups for sample in group.samples for span in sample.known_spans]
        own = sum(count for version, count in spans if version == running.version)
        metrics = self._evaluation.scored(running.step, sampled, step) | {
            "eval/lag_steps": float(step - running.step),
            "eval/policy_version": float(running.version),
            "timing/eval": self._clock() - running.started_s,
        }
        if total := sum(count for _, count in spans):  # else no version is known
            metrics["eval/share_of_version"] = own / total
        return metrics

    async def cancel(self, reason: str) -> None:
        """Cancel a running evaluation, without a score. Args: reason: for the log."""
        if self._running is None:
            return
        log.info("the evaluation of step %d has no score: %s", self._running.step, reason)
        await cancel([self._running.task])
        self._running = None
