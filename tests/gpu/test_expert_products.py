"""The experts' grouped products in bfloat16 on a GPU against float64, one expert after another."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from tests.support.families import make_trial
from tests.support.host_waits import pass_without_waiting
from tests.support.layouts import layout, model

pytestmark = [pytest.mark.gpus(1)]
COUNTS = {
    "uneven": [300, 0, 1, 17, 0, 3, 129, 62],
    "all with one": [0, 0, 0, 512, 0, 0, 0, 0],
    "one each": [1] * 8,
    "first and last without": [0, 9, 2, 7, 6, 200, 31, 0],
    "none at all": [0] * 8,
}
NUM, OUT, IN = 8, 192, 256
ROUNDING = 1e-2
"""Largest difference to float64, relative to the largest value."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def in_a_buffer(dtype: torch.dtype, gap: int, cut: int | None) -> list[Tensor]:
    """Views [OUT, IN] of a buffer full of NaN, `gap` elements between two of them and more before the one at `cut`."""
    size = OUT * IN
    buffer = torch.full(((NUM + 1) * (size + gap),), torch.nan, device="cuda", dtype=dtype)
    starts = [one * (size + gap) + (size if cut is not None and one >= cut else 0) for one in range(NUM)]
    return [buffer[start : start + size].view(OUT, IN) for start in starts]


def assert_near(mine: Tensor, theirs: Tensor) -> None:
    assert mine.shape == theirs.shape
    if theirs.numel():
        scale = float(theirs.abs().max().clamp(min=1e-6))
        assert float((mine.detach().double() - theirs).abs().max()) <= ROUNDING * scale


def test_a_pass_through_experts_waits_for_no_counts():
    trial = make_trial(model("qwen3_moe"), [50, 3, 17, 41, 8, 60, 22, 5])
    for impl in ("torch", "auto"):
        assert run_on_ranks(pass_without_waiting, (trial, layout(1, {}, transformer_impl=impl)), 1, timeout_s=200)


@pytest.mark.parametrize("buffered", [True, False], ids=["in Megatron's buffer", "handed back"])
@pytest.mark.parametrize(
    ("gap", "cut", "on_device"),
    [(0, None, True), (0, None, False), (64, None, True), (0, 5, False)],
    ids=["together", "together, counted by the host", "with gaps", "in two buckets"],
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_products_are_those_of_each_expert_and_wait_for_nothing(
    counts: list[int], gap: int, cut: int | None, on_device: bool, buffered: bool
):
    from skyrl_train.megatron.layers.expert_rows import ExpertRows
    from skyrl_train.megatron.layers.experts import grouped_linear

    rows_of = ExpertRows(torch.tensor(counts, device="cuda") if on_device else counts)
    weights = [torch.nn.Parameter(one) for one in in_a_buffer(torch.bfloat16, gap, cut)]
    held = in_a_buffer(torch.float32, gap, cut)
    for index, (weight, main_grad) in enumerate(zip(weights, held, strict=True)):
        weight.data.copy_(random(OUT, IN, seed=index))
        main_grad.fill_(0.25)
        if buffered:
            weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
    x, grad = random(sum(counts), IN, seed=20).requires_grad_(), random(sum(counts), OUT, seed=21)
    # Memory that the products get is full of NaN, as is what a kernel does not write.
    torch.full((4 * NUM * OUT * IN,), torch.nan, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = grouped_linear(x, weights, rows_of)
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not buffered or weights[0].grad_added_to_main_grad
    starts = [0, *accumulate(counts)]
    y64, grad_x = torch.zeros_like(grad, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    for one, weight in enumerate(weights):
        rows, w64 = slice(starts[one], starts[one + 1]), weight.detach().double()
        x64, grad64 = x.detach()[rows].double(), grad[rows].double()
        y64[rows], grad_x[rows] = x64 @ w64.t(), grad64 @ w64
        if buffered:
            assert_near(weight.main_grad - 0.25, grad64.t() @ x64)
        else:
            assert_near(weight.grad, grad64.t() @ x64)
    assert_near(y, y64)
    assert x.grad is not None
    assert_near(x.grad, grad_x)
