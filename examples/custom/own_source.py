"""A source of your own that prefers groups whose rewards differ: equal ones teach a group-relative loss nothing."""

from __future__ import annotations

from dataclasses import replace

from skyrl_train.data.order import Order
from skyrl_train.rollout.admission import Admission
from skyrl_train.rollout.seeds import seed
from skyrl_train.rollout.source import SourceParts, SourceState
from skyrl_train.types import Group, Metrics


class GroupsThatTeach:
    """Samples up to `extra.max_batches` batches of prompts for a step, and leaves the other groups out."""

    def __init__(self, parts: SourceParts) -> None:
        trainer = parts.config.trainer
        self._parts, self._size = parts, trainer.train_batch_size
        self._order = Order(parts.prompts, batch_size=self._size, seed=trainer.seed)
        self._admission = Admission(parts.config.generator.max_failed_share)
        self._share = 0.0

    async def next(self) -> list[Group]:
        config = self._parts.config
        teaching: list[Group] = []
        others: list[Group] = []
        for _ in range(config.extra["max_batches"]):
            rows = self._order.next_batch()
            self._admission.begin(len(rows) * config.generator.n_samples_per_prompt)
            # A row comes once in an epoch, so its samples are the same when the run is repeated or resumed.
            of_epoch = seed("train", config.trainer.seed, self._order.epoch)
            params = replace(self._parts.sampling_params, seed=of_epoch)
            for group in await self._parts.collect(rows, params, self._admission):
                (teaching if differ(group) else others).append(group)
            if len(teaching) >= self._size:
                break
        chosen = (teaching + others)[: self._size]
        self._share = sum(map(differ, chosen)) / len(chosen)
        self._admission.ledger.train(len(chosen))
        self._admission.ledger.leave_out(len(teaching) + len(others) - len(chosen))
        return chosen

    def metrics(self) -> Metrics:
        return {"own/share_of_teaching_groups": self._share} | self._admission.metrics()

    @property
    def state(self) -> SourceState:
        return self._order.state

    def resume(self, state: SourceState) -> None:
        self._order.resume(state)


def differ(group: Group) -> bool:
    """Whether the rewards of a group's samples differ."""
    return len({sample.reward for sample in group.samples}) > 1
