"""A forward and backward pass in which the host must not wait for its GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl_train.megatron.passes import step
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.ranks import Rendezvous
from tests.support.layouts import join_and_pack


def _refuse(*args: object) -> None:
    raise RuntimeError("the host waits for the device")


def pass_without_waiting(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> int:
    """Forward and backward, where waiting for the device raises; micro-batches."""
    trial, one = arguments
    policy, micro_batches = join_and_pack(rendezvous, trial, one, torch.bfloat16)
    # Kernels are compiled and loaded and communicators made, all of which waits.
    step.forward_backward(policy, micro_batches, trial.objective, with_entropy=False)
    schedule, synchronize = step.get_forward_backward_func(), torch.cuda.synchronize

    def without_waiting(**arguments: Any) -> Any:
        torch.cuda.synchronize = _refuse
        torch.cuda.set_sync_debug_mode("error")
        try:
            return schedule(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize = synchronize

    def find() -> Callable[..., Any]:
        return without_waiting

    step.get_forward_backward_func = find
    step.forward_backward(policy, micro_batches, trial.objective, with_entropy=False)
    return len(micro_batches)
