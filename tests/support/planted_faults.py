"""A policy for tests that does one thing wrong the next time its weights are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.weights import export as export_module
from skyrl_train.weight_sync.channels.shm import ShmSendChannel
from skyrl_train.weight_sync.send_report import SendClock

STALE = "model.layers.0.self_attn.o_proj.weight"
TASKS, TENSOR, SWAP, LOST, BYTES = "reused tasks", "stale tensor", "swapped pair", "lost bucket", "stale bytes"
_export = export_module.export
_publish, _digest = ShmSendChannel.publish, SendClock.digest


class FaultyPolicy(MegatronPolicy):
    """Right until a fault is injected, and again after one sync."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tasks: list[export_module.ExportTask] = []
        self._weights_before: dict[str, Tensor] = {}

    def remember(self) -> None:
        """What a faulty export will take for the weights later: those of this moment."""
        self._tasks = [held(task) for task in export_module.export_tasks(self.model)]
        self._weights_before = {name: tensor.clone() for name, tensor in _export(self.model, torch.float32)}

    def plant(self, fault: str) -> None:
        """On the first stage alone: after its failure the next stages are not asked to send."""
        import skyrl_train.megatron.policy as module

        if self.ranks.pp_rank != 0:
            return

        def broken(model: Any, dtype: torch.dtype, read: Any, tasks: Any) -> Iterator[tuple[str, Tensor]]:
            module.export = _export
            yield from self._broken(fault, dtype)

        if fault in (TASKS, TENSOR, SWAP):
            module.export = broken
        elif self.ranks.owns_stage:
            _lose_a_bucket() if fault == LOST else _change_bytes()

    def _broken(self, fault: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        if fault == TASKS:
            yield from _export(self.model, dtype, tasks=self._tasks)
            return
        found = dict(_export(self.model, dtype))
        names = list(found)
        if fault == TENSOR and STALE in found:
            found[STALE] = self._weights_before[STALE]
        elif fault == SWAP:
            one, other = [name for name in names if name.endswith("o_proj.weight")][:2]
            found[one], found[other] = found[other], found[one]
        for name in names:
            yield name, found[name]


def held(task: export_module.ExportTask) -> export_module.ExportTask:
    """The task, with the tensor's values of this moment."""
    holder = torch.nn.Module()
    holder.register_buffer("held", task.live.tensor.detach().clone())
    return replace(task, live=replace(task.live, owner=holder, attribute="held"))


def _lose_a_bucket() -> None:
    """The second bucket of the next sync is packed and digested, and never handed over."""
    count = 0

    def publish(self: ShmSendChannel, num_bytes: int) -> None:
        nonlocal count
        count += 1
        if count == 2:
            ShmSendChannel.publish = _publish  # type: ignore[method-assign]
            return
        _publish(self, num_bytes)

    ShmSendChannel.publish = publish  # type: ignore[method-assign]


def _change_bytes() -> None:
    """Of the next bucket the engines read other bytes than those that were digested."""
    waiting: list[Any] = []

    def publish(self: ShmSendChannel, num_bytes: int) -> None:
        waiting.append((self, num_bytes))

    def digest(self: SendClock, bucket: Any) -> None:
        ShmSendChannel.publish, SendClock.digest = _publish, _digest  # type: ignore[method-assign]
        _digest(self, bucket)
        bucket.data[: bucket.specs[0].num_bytes] = 0
        _publish(*waiting.pop())

    ShmSendChannel.publish, SendClock.digest = publish, digest  # type: ignore[method-assign]
