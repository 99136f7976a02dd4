"""What the stages of a pipeline send one another: activations and gradients, and nothing ahead of them."""

from __future__ import annotations

import gc
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.megatron.passes.step import forward_backward
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial
from tests.support.layouts import join_and_pack, layout, model

HIDDEN = 64
Message = tuple[torch.dtype, tuple[int, ...]]


def _pass(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> tuple[list[int], list[Message], int, int]:
    """While the gradient is computed: tokens that this rank has of each micro-batch, what it sends, and how often it
    would wait for its device; afterwards: how many messages it still has."""
    trial, one = arguments
    policy, micro_batches = join_and_pack(rendezvous, trial, one, torch.float32)
    sent: list[Message] = []
    together, alone = dist.batch_isend_irecv, dist.isend

    def note(tensor: Tensor) -> None:
        sent.append((tensor.dtype, tuple(tensor.shape)))

    def batched(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op is alone:
                note(operation.tensor)
        return together(operations)

    def on_its_own(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        note(tensor)
        return alone(tensor, *args, **kwargs)

    if one.megatron.virtual_pipeline_model_parallel_size is None:
        dist.batch_isend_irecv = batched
    else:
        dist.isend = on_its_own
    waits: list[None] = []
    torch.cuda.synchronize = lambda device=None: waits.append(None)
    forward_backward(policy, micro_batches, trial.objective, with_entropy=False)
    share = one.megatron.tensor_model_parallel_size if one.megatron.sequence_parallel else 1
    tokens = [micro_batch.token_ids.shape[1] // share for micro_batch in micro_batches]
    shapes = {(size, 1, HIDDEN) for size in tokens}
    return tokens, sent, len(waits), _kept(shapes)


def _kept(shapes: set[tuple[int, ...]]) -> int:
    """Tensors of these shapes that stay. A thread of gloo lets go of what it sent a moment after the receiver has it,
    so what is still there is counted again for up to ten seconds."""
    deadline = time.monotonic() + 10.0
    while True:
        kept = sum(isinstance(found, Tensor) and tuple(found.shape) in shapes for found in gc.get_objects())
        if not kept or time.monotonic() > deadline:
            return kept
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("processes", "sizes", "stages"),
    [(2, {"pp": 2}, 2), (2, {"pp": 2, "vpp": 2}, 4), (4, {"pp": 2, "tp": 2}, 2), (4, {"pp": 2, "cp": 2}, 2)],
    ids=["PP2", "PP2 VPP2", "TP2 SP PP2", "CP2 PP2"],
)
def test_each_stage_sends_each_micro_batch_once_with_no_shape_ahead_of_it_and_keeps_none(
    processes: int, sizes: dict[str, int], stages: int
):
    trial = make_trial(model("qwen3"), [50, 3, 17, 41, 8, 60, 22, 5])
    found = run_on_ranks(_pass, (trial, layout(processes, sizes)), processes, timeout_s=120)
    tokens = found[0][0]
    assert len(tokens) >= 4 and len(set(tokens)) >= 3, "micro-batches differ in length"
    sent = Counter(message for _, messages, *_ in found for message in messages)
    # Forward and back over each border, by each pair of ranks that faces one another there.
    times = 2 * (stages - 1) * processes // 2
    assert not sum(waits for _, _, waits, _ in found) and not sum(kept for *_, kept in found)
    assert sent == {(torch.float32, (size, 1, HIDDEN)): count * times for size, count in Counter(tokens).items()}
