"""A pass through a pipeline runs ahead of its GPUs: the host waits for none of its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyrl_train.megatron.passes import step
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial
from tests.support.layouts import join_and_pack, layout, model

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(300)]


def _refuse(*args: object) -> None:
    raise RuntimeError("the host waits for the device")


def _pass(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> int:
    """Forward and backward, where waiting for the device raises; micro-batches."""
    trial, one = arguments
    policy, micro_batches = join_and_pack(rendezvous, trial, one, torch.bfloat16)
    # Kernels are compiled and loaded and communicators made, all of which waits.
    step.forward_backward(policy, micro_batches, trial.objective, with_entropy=False)
    # Megatron's end of a mini-batch reads a number of tokens, once.
    policy.bridge.config.finalize_model_grads_func = None
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


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "vpp": 2}], ids=["PP2", "PP2 VPP2"])
def test_the_host_waits_for_no_message_between_stages(sizes: dict[str, int]):
    trial = make_trial(model("qwen3"), [50, 3, 17, 41, 8, 60, 22, 5])
    found = run_on_ranks(_pass, (trial, layout(2, sizes, transformer_impl="torch")), 2, timeout_s=200)
    assert found[0] == found[1] >= 4
