"""Contract of sources of groups, and the on-policy source. `trainer.source` names a source."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from skyrl_train.config import Config
from skyrl_train.data.order import Order
from skyrl_train.faults import described, is_cancellation, is_of_package, name_of, numbers, omitted, passes, plain_json
from skyrl_train.rollout import contract
from skyrl_train.rollout.admission import Admission
from skyrl_train.rollout.collect import Collector, Progress
from skyrl_train.rollout.seeds import seed
from skyrl_train.rollout.shaping import Shaping, copies, has_signal
from skyrl_train.tracking.timers import Timers
from skyrl_train.types import Group, Metrics, Prompt, SamplingParams

log = logging.getLogger(__name__)
SourceState = dict[str, Any]
"""JSON values that determine what comes next, for checkpoints."""


class Resumable(Protocol):
    """A source whose position checkpoints store. Checkpoints are written between steps."""

    @property
    def state(self) -> SourceState:
        """Position after the last rows or groups that it returned."""

    def resume(self, state: SourceState) -> None:
        """Continue after a saved state; called once at most, before the first step. Raises: ValueError for a state that
        does not fit.
        """


class GroupSource(Resumable, Protocol):
    """Gives the trainer the groups of each step."""

    async def next(self) -> list[Group]:
        """Wait for the groups of one step: 1 to `trainer.policy_mini_batch_size` groups, or a multiple of it."""

    def metrics(self) -> Metrics:
        """Metrics of the last step that its groups alone do not determine."""


class SourceFailure(RuntimeError):
    """A user's own source raised, or returned no groups; the message names it. `__cause__` is the original error."""


async def groups_of(source: GroupSource) -> list[Group]:
    """The groups of the next step. Raises: SourceFailure for an error of a user's own source, or for anything else than
    groups; errors of engines, rollouts and built-in sources as they are.
    """
    owner = f"the source {name_of(type(source))}"
    try:
        groups = await source.next()
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        is_own = not is_of_package(source.next) and not is_of_package(type(error))
        # An error that passes the contract is one of the engines, whatever its type.
        if not is_own or passes(error, contract.__file__) or is_cancellation(error):
            raise
        raise SourceFailure(f"{owner} failed: {described(error, __file__)}") from error
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Group) for group in groups):
        allowed = "a list of groups (skyrl_train.types.Group)"
        raise SourceFailure(f"{owner} returned {groups!r:.100}: next() must return {allowed}")
    if not groups and not is_of_package(source.next):
        raise SourceFailure(f"{owner} returned no groups: next() must wait for at least one, or raise an error")
    return list(groups)


def with_metrics_of(source: GroupSource, metrics: Metrics) -> Metrics:
    """What a source reports, and the run's own metrics, which win; a user's of the same name is a warning. If a user's
    source fails, it has none and the error is logged: the groups are trained already.
    """
    reported = _metrics_of(source)
    for name in sorted(reported.keys() & metrics.keys()) if not is_of_package(source.metrics) else ():
        omitted(f"source {name_of(type(source))}", name, "the run logs its own by this name. Rename it")
    return reported | metrics


def _metrics_of(source: GroupSource) -> Metrics:
    owner = f"source {name_of(type(source))}"
    try:
        given: object = source.metrics()
        if not isinstance(given, Mapping):
            raise TypeError(f"metrics() returned {given!r:.100}. Return a dict of numbers")
        return numbers(given, owner)
    except (Exception, SystemExit) as error:
        if is_of_package(source.metrics):
            raise
        log.error("metrics of the %s are left out: %s", owner, described(error, __file__))
        return {}


@runtime_checkable
class HoldsGroups(Protocol):
    """A source that stores its finished groups in checkpoints."""

    def snapshot(self) -> tuple[SourceState, bytes]:
        """State after the groups last returned by `next`, and the finished groups that are not trained yet. Also valid
        after `next` has raised.
        """

    def restore(self, state: SourceState, data: bytes) -> None:
        """Continue after a snapshot. Raises: ValueError for one that does not fit."""


def state_of(source: Resumable, state: SourceState | None = None) -> SourceState:
    """A copy of a source's state, or of the given one. Raises: SourceFailure for what a checkpoint would not return."""
    given: object = source.state if state is None else state
    try:
        if isinstance(given, Mapping):
            return plain_json(given, "state")
        raise TypeError(f"state is {type(given).__name__} {given!r:.60}")
    except TypeError as error:
        raise SourceFailure(
            f"the source {name_of(type(source))} cannot be saved in a checkpoint: {error}. Return from `state` a dict "
            "of JSON values: text, numbers, True, False, None, lists, and dicts with keys of text"
        ) from error


def snapshot_of(source: Resumable, state: SourceState | None = None) -> tuple[SourceState, bytes]:
    """State of a source and its finished groups, taken at once: others may finish while files are written.

    Args: state: instead of the present one, for a source that holds no groups. Raises: like `state_of`.
    """
    if isinstance(source, HoldsGroups):
        state, groups = source.snapshot()
        return state_of(source, state), groups
    return state_of(source, state), b""


def resume_source(source: Resumable, state: SourceState, groups: bytes) -> None:
    """Continue after a snapshot. Raises: ValueError for one that does not fit."""
    if groups and isinstance(source, HoldsGroups):
        source.restore(state, groups)
    else:
        source.resume(state)


@runtime_checkable
class RollsBack(Protocol):
    """A source that can undo its last `next`."""

    def roll_back(self) -> None:
        """The groups last returned by `next` were not trained and are finished ones again, for a `snapshot` at the end
        of the run.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceParts:
    """Argument of a source's constructor."""

    config: Config
    prompts: Sequence[Prompt]
    """All rows of `data.train_data`, in order."""
    sampling_params: SamplingParams
    """`generator.sampling_params`, without a seed."""
    collector: Collector
    progress: Progress
    timers: Timers
    policy_version: Callable[[], int] = lambda: 0
    """Version of the policy's weights, between steps that of the engines too."""
    num_steps: int | None = None
    """Steps of the run; None if unknown."""
    with_greedy: bool = False
    """Whether the advantage estimator compares with a greedy response to each prompt."""
    wake_engines: Callable[[], Awaitable[None]]
    """Makes the engines ready to generate from the newest weights. On shared devices they stay ready until `next`
    returns; the trainer then takes the devices."""

    def __post_init__(self) -> None:
        """Raises: ValueError if two rows have one uid, by which a resumed run finds them."""
        uids = [prompt.uid for prompt in self.prompts]
        if len(set(uids)) < len(uids):
            twice = next(uid for uid, count in Counter(uids).items() if count > 1)
            raise ValueError(f"two prompts have the uid {twice!r}. Give each prompt of the training data its own")

    def admission(self, num_groups: int | None = None, *, num_attempts: int = 1, cancels: bool = False) -> Admission:
        """Admission by the rules of the configuration. Args: num_groups: number of groups that
        `dynamic_sampling.max_sample_batches` multiplies; None for a source that counts rounds itself; others: like
        `Admission`.
        """
        sampling = self.config.trainer.algorithm.dynamic_sampling
        limit = sampling.max_sample_batches
        return Admission(
            self.config.generator.max_failed_share,
            filters=sampling.type is not None,
            max_filtered=limit * num_groups if num_groups is not None and limit > 0 else None,
            num_attempts=num_attempts,
            cancels=cancels,
        )

    def seeded(self, epoch: int) -> SamplingParams:
        """Parameters whose seeds depend on epoch, row and sample, not on the step: an epoch has each row once, and one
        that starts again gets the same samples (else short responses would be favoured).
        """
        return replace(self.sampling_params, seed=seed("train", self.config.trainer.seed, epoch))

    async def collect(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams, admission: Admission
    ) -> list[Group]:
        """`generator.n_samples_per_prompt` rollouts of each prompt, with the configured penalties and masks."""
        with self.timers("sync_weights"):
            await self.wake_engines()
        with self.timers("generate"):
            groups = await self._collect(prompts, sampling_params, admission, self.progress)
        self.timers.add("generate_tail", self.collector.tail_s)
        return groups

    async def group(self, prompt: Prompt, epoch: int, admission: Admission, progress: Progress) -> Group | None:
        """One group like those of `collect`, from engines that are awake; None if it failed or was filtered."""
        made = await self._collect([prompt], self.seeded(epoch), admission, progress)
        kept = self.with_signal(made, admission)
        return kept[0] if kept else None

    def with_signal(self, groups: list[Group], admission: Admission) -> list[Group]:
        """The groups without those that dynamic sampling filters."""
        filters = self.config.trainer.algorithm.dynamic_sampling.type is not None
        kept = [group for group in groups if not filters or has_signal(group)]
        admission.filter(len(groups) - len(kept))
        return kept

    async def _collect(
        self, prompts: Sequence[Prompt], params: SamplingParams, admission: Admission, progress: Progress
    ) -> list[Group]:
        n_samples = self.config.generator.n_samples_per_prompt
        groups = await self.collector.collect(
            prompts, n_samples, params, progress, admission, with_greedy=self.with_greedy
        )
        return list(map(Shaping(self.config), groups))


class OnPolicySource:
    """Every sample of a step is generated by the weights from which the step starts."""

    def __init__(self, parts: SourceParts) -> None:
        trainer, generator = parts.config.trainer, parts.config.generator
        self._parts, self._seed, self._size = parts, trainer.seed, trainer.train_batch_size
        self._order = Order(parts.prompts, batch_size=self._size, seed=trainer.seed)
        self._num_rollouts = self._size * generator.n_samples_per_prompt
        self._dynamic_sampling = trainer.algorithm.dynamic_sampling
        self._admission = parts.admission()

    async def next(self) -> list[Group]:
        """Groups of the next rows; failed and filtered ones are replaced one for one.

        Raises: like `Collector`; RuntimeError if dynamic sampling does not find enough groups.
        """
        self._admission.begin(self._num_rollouts)
        sampling, groups = self._dynamic_sampling, list[Group]()
        num_rounds = num_copies = 0
        while missing := self._size - len(groups):
            if sampling.type is not None and num_rounds == sampling.max_sample_batches:
                raise RuntimeError(
                    f"after trainer.algorithm.dynamic_sampling.max_sample_batches={num_rounds} rounds only "
                    f"{len(groups)} of {self._size} groups have samples of different rewards. Raise it (-1: no limit), "
                    "use easier or harder prompts, or set trainer.algorithm.dynamic_sampling.type=null"
                )
            rows = self._order.next_rows(missing)
            made = await self._parts.collect(rows, self._parts.seeded(self._order.epoch), self._admission)
            kept = self._parts.with_signal(made, self._admission)
            groups += kept
            if len(rows) < missing:
                continue  # the other rows of the round are of the next epoch
            num_rounds += len(kept) < len(made)  # a round in which groups only failed does not count
            if sampling.type == "replace" and len(groups) > sampling.min_replace_ratio * self._size:
                num_copies = self._size - len(groups)
                groups += copies(groups, num_copies, self._seed)
        self._admission.ledger.train(len(groups) - num_copies)
        return groups

    def metrics(self) -> Metrics:
        return {"trainer/epoch": float(self._order.epoch)} | self._admission.metrics()

    @property
    def state(self) -> SourceState:
        return self._order.state

    def resume(self, state: SourceState) -> None:
        """Raises: ValueError for the state of another source, or of other rows."""
        self._order.resume(state)


SOURCES = {
    "on_policy": "skyrl_train.rollout.oversampling:on_policy_source",
    "streaming": "skyrl_train.rollout.streaming.streaming:StreamingSource",
}
"""Name -> `module:attribute` that takes SourceParts and returns a GroupSource."""
