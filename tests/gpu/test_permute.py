"""Tokens sent to their experts and back, against float64 sums over the routing map.

`TRITON_INTERPRET=1 python -m pytest tests/gpu/test_permute.py` runs them without a GPU, where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.triton_cases import DEVICE, DTYPES, INTERPRETED, WHERE, assert_near, random

pytestmark = WHERE


def routing(kind: str) -> Tensor:
    """[T, E] bool: which token goes to which experts."""
    scores = torch.rand(37, 8, generator=torch.Generator().manual_seed(4))
    if kind == "uneven":  # any number of experts for a token, some without one; and the other way round
        chosen = scores > 0.6
        chosen[5], chosen[:, 3] = False, False
    else:
        chosen = torch.zeros(37, 8, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True)
    return (chosen[:0] if kind == "no tokens" else chosen).to(DEVICE)


@pytest.fixture
def dispatcher() -> Any:
    from megatron.core.transformer.moe import token_dispatcher

    from skyrl_train.megatron.layers import permute

    permute.install()
    return token_dispatcher


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 100, 1500])
@pytest.mark.parametrize("kind", ["two each", "uneven", "no tokens"])
def test_tokens_go_to_their_experts_and_come_back_added_up(dispatcher: Any, dtype: torch.dtype, width: int, kind: str):
    chosen = routing(kind)
    num_rows = int(chosen.sum())
    tokens = random(len(chosen), width, dtype=dtype, seed=1).requires_grad_()
    probs = random(len(chosen), 8, dtype=torch.float32, seed=2).requires_grad_()
    factors = random(num_rows, width, dtype=dtype, seed=3)  # what the experts do: each row times something
    up = random(len(chosen), width, dtype=dtype, seed=5)
    if not INTERPRETED:
        torch.cuda.set_sync_debug_mode("error")
    try:
        rows, row_probs, mapping, *_ = dispatcher.permute(tokens, chosen, probs=probs, num_out_tokens=num_rows)
        out = dispatcher.unpermute(
            rows * factors * row_probs[:, None].to(dtype), mapping, restore_shape=tokens.shape, routing_map=chosen
        )
        out.backward(up)
    finally:
        if not INTERPRETED:
            torch.cuda.set_sync_debug_mode("default")
    experts, owners = chosen.t().nonzero(as_tuple=True)
    x64, p64 = tokens.detach().double(), probs.detach().double()
    assert torch.equal(rows, tokens[owners])
    assert torch.equal(row_probs, probs[owners, experts])
    placed = torch.zeros(num_rows, len(chosen), device=DEVICE, dtype=torch.float64)
    placed[torch.arange(num_rows), owners] = 1.0
    weighted = factors.double() * p64[owners, experts][:, None]
    assert_near(out, placed.t() @ (placed @ x64 * weighted), dtype)
    assert tokens.grad is not None and probs.grad is not None
    up64 = placed @ up.double()
    assert_near(tokens.grad, placed.t() @ (up64 * weighted), dtype)
    grad_probs = torch.zeros_like(p64)
    grad_probs[owners, experts] = (up64 * factors.double() * (placed @ x64)).sum(1)
    assert_near(probs.grad, grad_probs, dtype)


def test_rows_of_a_token_are_added_in_float32(dispatcher: Any):
    chosen = torch.ones(3, 258, dtype=torch.bool, device=DEVICE)
    ones = torch.full((3, 8), 1.0, device=DEVICE, dtype=torch.bfloat16)
    rows, _, mapping, *_ = dispatcher.permute(ones, chosen, num_out_tokens=3 * 258)
    rows = rows.clone()
    rows[0] = 256.0  # one more cannot be added to it in bfloat16
    out = dispatcher.unpermute(rows, mapping, restore_shape=ones.shape)
    assert out[:, 0].tolist() == [512.0, 258.0, 258.0]


def test_chunks_that_are_in_order_are_handed_on_and_others_sorted(dispatcher: Any):
    x, probs = random(9, 4, dtype=torch.float32, seed=1), random(9, dtype=torch.float32, seed=2)
    sizes = torch.tensor([4, 0, 3, 2])
    same, same_probs = dispatcher.sort_chunks_by_idxs(x, sizes, torch.arange(4), probs=probs)
    assert same is x and same_probs is probs
    turned, turned_probs = dispatcher.sort_chunks_by_idxs(x, sizes, torch.tensor([2, 0, 3, 1]), probs=probs)
    order = [4, 5, 6, 0, 1, 2, 3, 7, 8]
    assert torch.equal(turned, x[order]) and torch.equal(turned_probs, probs[order])
