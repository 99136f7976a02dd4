"""The parts of an update, each between two synchronisations of the device, in the policy's own code.

Waiting for each part keeps the host from running ahead, so the whole takes longer than an update does; `rest` is what
no part explains.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from skyrl_train.device import synchronize
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.types import TrainBatch

WHOLE, REST = "whole, with waiting for each part", "rest"


class Stopwatch:
    """Seconds by part. A part within a part belongs to the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        synchronize()
        started, self._inside = time.perf_counter(), True
        try:
            yield
            synchronize()
        finally:
            self.seconds[part] += time.perf_counter() - started
            self._inside = False

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(part):
                return function(*args, **kwargs)

        return timed


def measure_parts(policy: MegatronPolicy, batch: TrainBatch, count: int) -> dict[str, float]:
    """Median seconds of each part on this rank over `count` updates; all ranks must call it."""
    updates = [_one_update(policy, batch) for _ in range(count)]
    return {part: statistics.median(one[part] for one in updates) for part in updates[0]}


def _one_update(policy: MegatronPolicy, batch: TrainBatch) -> dict[str, float]:
    watch = Stopwatch()
    with ExitStack() as patches:
        for part, owner, name in _places(policy):
            patches.enter_context(patch.object(owner, name, watch.around(part, getattr(owner, name))))
        names = MegatronPolicy._train.__globals__
        timed = watch.around("forward + backward", names["forward_backward"])
        patches.enter_context(patch.dict(names, forward_backward=timed))
        synchronize()
        started = time.perf_counter()
        policy.update(batch)
        synchronize()
        whole_s = time.perf_counter() - started
    return dict(watch.seconds) | {REST: whole_s - sum(watch.seconds.values()), WHOLE: whole_s}


def _places(policy: MegatronPolicy) -> Iterator[tuple[str, type, str]]:
    """(part, class, method)."""
    optimizer = type(policy._optimizer)
    yield "pack", type(policy._packer), "pack"
    yield "zeroing", type(policy.model.chunks[0]), "zero_grad_buffer"
    yield "zeroing", optimizer, "zero_grad"
    yield "gradients prepared and their norm", optimizer, "prepare_grads"
    yield "gradients prepared and their norm", optimizer, "get_grad_norm"
    yield "optimizer step", optimizer, "step_with_ready_grads"
