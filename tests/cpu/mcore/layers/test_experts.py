"""The experts' matrix products against float64, one expert after another; and what Megatron receives of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.config import load_config
from skyrl_train.megatron.layers import experts
from skyrl_train.megatron.layers.expert_rows import ExpertRows
from skyrl_train.megatron.layers.experts import GroupedLinear, grouped_linear
from skyrl_train.megatron.model import model as models
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.verify.hf_reference import comparable
from skyrl_train.megatron.verify.layout_check import run_objectives
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import compare
from skyrl_train.ranks import Rendezvous
from tests.support.layouts import assert_exact, layout, model, reference

COUNTS = {
    "uneven": [5, 0, 1, 17, 0, 3],
    "all with one": [0, 0, 0, 29, 0, 0],
    "one each": [1] * 6,
    "first and last without": [0, 9, 2, 7, 6, 0],
    "none at all": [0] * 6,
}
OUT, IN = 24, 16
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest difference to float64, relative to the largest value."""
counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
dtypes = pytest.mark.parametrize("dtype", ROUNDING)


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_a_buffer(
    num: int, shape: tuple[int, int], dtype: torch.dtype, gap: int = 0, gap_before: int = -1
) -> list[Tensor]:
    """Views of one buffer, each `gap` elements behind the one before, and more before one of them."""
    size = shape[0] * shape[1]
    buffer = torch.zeros((num + 1) * (size + gap), dtype=dtype)
    starts = [index * (size + gap) + (size if index >= gap_before >= 0 else 0) for index in range(num)]
    return [buffer[start : start + size].view(shape) for start in starts]


def by_hand(x: Tensor, weights: list[Tensor], grad: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the gradient of x and those of the weights, float64."""
    x64, grad64 = x.detach().double(), grad.double()
    y, grad_x, grad_weights = grad64.new_zeros(grad.shape), torch.zeros_like(x64), []
    start = 0
    for count, weight in zip(counts, weights, strict=True):
        w64, rows = weight.detach().double(), slice(start, start + count)
        y[rows] = torch.einsum("ti,oi->to", x64[rows], w64)
        grad_x[rows] = torch.einsum("to,oi->ti", grad64[rows], w64)
        grad_weights.append(torch.einsum("to,ti->oi", grad64[rows], x64[rows]))
        start += count
    return y, grad_x, grad_weights


def assert_near(mine: Tensor, theirs: Tensor, dtype: torch.dtype, scale: float | None = None) -> None:
    assert mine.shape == theirs.shape
    if theirs.numel():
        limit = ROUNDING[dtype] * max(float(theirs.abs().max()) if scale is None else scale, 1e-6)
        assert float((mine.detach().double() - theirs).abs().max()) <= limit


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of experts of the grouped products that were asked for."""
    asked: list[int] = []
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        asked.append(len(offs))
        return grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    return asked


def run(
    dtype: torch.dtype, counts: list[int], weights: list[Tensor], rows: ExpertRows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x with its gradient, y, and the gradient of y; the weights get random values first."""
    for index, weight in enumerate(weights):
        weight.data.copy_(random(OUT, IN, dtype=dtype, seed=index))
    x = random(sum(counts), IN, dtype=dtype, seed=10).requires_grad_()
    grad = random(sum(counts), OUT, dtype=dtype, seed=11)
    y = grouped_linear(x, weights, rows or counts)
    y.backward(grad)
    return x, y, grad


@dtypes
@counts
@pytest.mark.parametrize("kind", [list, torch.tensor], ids=["counted by the host", "counted by the device"])
def test_the_product_and_its_gradients_are_those_of_each_expert(
    kind: Callable[[list[int]], Any], dtype: torch.dtype, counts: list[int], products: list[int]
):
    weights = [torch.nn.Parameter(one) for one in in_a_buffer(6, (OUT, IN), dtype)]
    x, y, grad = run(dtype, counts, weights, ExpertRows(kind(counts)))
    y64, grad_x, grad_weights = by_hand(x, weights, grad, counts)
    assert products == ([6, 6, 6] if sum(counts) else [])
    assert_near(y, y64, dtype)
    assert_near(x.grad, grad_x, dtype)
    for weight, theirs in zip(weights, grad_weights, strict=True):
        assert_near(weight.grad, theirs, dtype)


@dtypes
@counts
@pytest.mark.parametrize(
    ("gap", "gap_before", "lengths"), [(0, -1, [6]), (64, -1, [6]), (64, 2, [2, 4]), (64, 1, [2, 4])], ids=str
)
def test_gradients_are_added_to_megatrons_buffer(
    dtype: torch.dtype, counts: list[int], gap: int, gap_before: int, lengths: list[int], products: list[int]
):
    weights = [torch.nn.Parameter(one) for one in in_a_buffer(6, (OUT, IN), dtype, gap, gap_before)]
    held = in_a_buffer(6, (OUT, IN), torch.float32, gap, gap_before)
    for index, (weight, main_grad) in enumerate(zip(weights, held, strict=True)):
        main_grad.copy_(random(OUT, IN, dtype=torch.float32, seed=20 + index))
        weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
    before = [main_grad.clone() for main_grad in held]
    x, y, grad = run(dtype, counts, weights)
    y64, grad_x, grad_weights = by_hand(x, weights, grad, counts)
    assert set(products) <= set(lengths)
    assert_near(y, y64, dtype)
    assert_near(x.grad, grad_x, dtype)
    for weight, old, theirs in zip(weights, before, grad_weights, strict=True):
        assert_near(weight.main_grad, old.double() + theirs, dtype, scale=float(theirs.abs().max()) + 1e-2)
    # A hook runs where there is a gradient; what stands for those of all is one matrix.
    assert weights[0].grad_added_to_main_grad
    assert [weight.grad is not None for weight in weights] == [True] + [False] * 5


@pytest.mark.parametrize("first", [0, 2])
def test_products_of_experts_without_rows_are_cleared(first: int):
    for counts in (COUNTS["uneven"], torch.tensor(COUNTS["uneven"])):
        products = torch.full((6 - first, OUT, IN), torch.nan)
        ExpertRows(counts).clear_without_rows(products, first)
        assert [bool((one == 0).all()) for one in products] == [count == 0 for count in COUNTS["uneven"][first:]]


def test_weights_that_lie_apart_are_multiplied_one_by_one(products: list[int]):
    weights = [torch.nn.Parameter(torch.empty(OUT, IN)) for _ in range(6)]
    order = sorted(weights, key=lambda weight: -weight.data_ptr())
    counts = COUNTS["uneven"]
    x, y, grad = run(torch.float32, counts, order)
    y64, grad_x, grad_weights = by_hand(x, order, grad, counts)
    assert products == [6]  # the gradients of the weights, which have no place of their own
    assert_near(y, y64, torch.float32)
    assert_near(x.grad, grad_x, torch.float32)
    for weight, theirs in zip(order, grad_weights, strict=True):
        assert_near(weight.grad, theirs, torch.float32)


@pytest.mark.parametrize(("dtype", "out"), [(torch.float64, OUT), (torch.float32, 10), (torch.bfloat16, 12)])
def test_what_torch_does_not_group_is_multiplied_one_by_one(dtype: torch.dtype, out: int, products: list[int]):
    weights = [torch.nn.Parameter(one) for one in random(6, out, IN, dtype=dtype, seed=1).unbind(0)]
    x = random(26, IN, dtype=dtype, seed=2).requires_grad_()
    grad = random(26, out, dtype=dtype, seed=3)
    y = grouped_linear(x, weights, COUNTS["uneven"])
    y.backward(grad)
    y64, grad_x, grad_weights = by_hand(x, weights, grad, COUNTS["uneven"])
    assert not products
    bound = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert_near(y, y64, bound)
    assert_near(x.grad, grad_x, bound)
    for weight, theirs in zip(weights, grad_weights, strict=True):
        assert_near(weight.grad, theirs, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@counts
def test_weights_in_one_tensor_are_multiplied_as_separate_ones_are(
    dtype: torch.dtype, counts: list[int], products: list[int]
):
    weights = random(6, OUT, IN, dtype=dtype, seed=1).requires_grad_()
    x = random(sum(counts), IN, dtype=dtype, seed=2).requires_grad_()
    grad = random(sum(counts), OUT, dtype=dtype, seed=3)
    y = grouped_linear(x, weights * 1, counts)
    y.backward(grad)
    assert products == ([6, 6, 6] if sum(counts) and dtype != torch.float64 else [])
    y64, grad_x, grad_weights = by_hand(x, list(weights), grad, counts)
    bound = torch.float32 if dtype == torch.float64 else dtype
    assert_near(y, y64, bound)
    assert_near(x.grad, grad_x, bound)
    assert_near(weights.grad, torch.stack(grad_weights), bound)


def test_a_single_row_may_have_any_stride():
    weights = [torch.nn.Parameter(one) for one in in_a_buffer(6, (OUT, IN), torch.float32)]
    x, grad = torch.randn(IN).expand(1, -1), torch.randn(OUT).expand(1, -1)
    y = grouped_linear(x.requires_grad_(), weights, [0, 0, 1, 0, 0, 0])
    y.backward(grad.as_strided((1, OUT), (1, 1)))
    assert_near(weights[2].grad, torch.outer(grad[0], x[0].detach()).double(), torch.float32)


def test_a_step_without_gradients_of_x_or_of_the_weights_leaves_them_out(products: list[int]):
    weights = [torch.nn.Parameter(one, requires_grad=False) for one in in_a_buffer(6, (OUT, IN), torch.float32)]
    run(torch.float32, COUNTS["uneven"], weights)
    assert products == [6, 6] and all(weight.grad is None for weight in weights)
    products.clear()
    trained = [torch.nn.Parameter(one) for one in in_a_buffer(6, (OUT, IN), torch.float32)]
    grouped_linear(torch.randn(26, IN), trained, COUNTS["uneven"]).sum().backward()
    assert products == [6, 6] and all(weight.grad is not None for weight in trained)


def test_numbers_of_tokens_that_do_not_fit_the_rows_are_refused():
    weights = [torch.nn.Parameter(one) for one in in_a_buffer(6, (OUT, IN), torch.float32)]
    with pytest.raises(AssertionError, match="26 tokens of experts, 27 rows"):
        grouped_linear(torch.randn(27, IN), weights, COUNTS["uneven"])


def _lengths_of_runs(rendezvous: Rendezvous, arguments: tuple[str, Any, bool]) -> list[Any]:
    folder, megatron, trainable = arguments
    join(rendezvous, megatron, seed=1)
    built = build_model(folder, megatron, torch.bfloat16, trainable=trainable)
    found: list[Any] = []
    for module in built.modules[0].modules():
        if isinstance(module, GroupedLinear):
            assert [name for name, _ in module.named_parameters()] == [
                f"weight{i}" for i in reversed(range(module.num_gemms))
            ]
            assert experts._is_supported(torch.zeros(1, dtype=torch.float32), module.weights)
            kinds = [module.weights]
            if trainable:
                kinds.append([weight.main_grad for weight in module.weights])
            found += [[len(block) for _, block in experts._runs(kind, joined=True)] for kind in kinds]
    if trainable:
        build_optimizer(built, load_config().trainer.policy.optimizer_config)
    return found


@pytest.mark.parametrize("trainable", [True, False], ids=["policy", "reference"])
@pytest.mark.parametrize(("processes", "sizes", "num"), [(1, {}, 4), (2, {"ep": 2}, 2), (2, {"tp": 2, "etp": 2}, 4)])
def test_experts_of_a_built_model_are_one_view(processes: int, sizes: dict[str, Any], num: int, trainable: bool):
    one = layout(processes, sizes)
    for found in run_on_ranks(
        _lengths_of_runs, (str(model("qwen3_moe")), one.megatron, trainable), processes, timeout_s=60.0
    ):
        assert len(found) >= 2 and all(lengths == [num] for lengths in found), found


@pytest.mark.parametrize(
    ("processes", "sizes", "bucket"),
    [(2, {}, 2500), (2, {}, 40_000), (4, {"ep": 2}, 40_000)],
    ids=["DP2, a bucket for each weight", "DP2", "EP2 DP4"],
)
def test_gradients_that_are_reduced_while_others_are_computed_are_hugging_faces(
    processes: int, sizes: dict[str, Any], bucket: int, monkeypatch: pytest.MonkeyPatch
):
    """As on GPUs, while the gradients of all experts are one product."""
    overlapping = {"overlap_grad_reduce": True, "bucket_size": bucket}
    settings = models.DistributedDataParallelConfig
    monkeypatch.setattr(models, "DistributedDataParallelConfig", lambda **given: settings(**(given | overlapping)))
    trial, hf, _ = reference("qwen3_moe")
    # In the first pass the wrapper learns which gradients come; it starts reductions from the second on.
    for outcome in run_objectives(trial, layout(processes, sizes), [trial.objective] * 3):
        assert_exact(compare(comparable(outcome, hf), hf))


def test_a_bucket_that_ends_between_experts_cuts_the_view_in_two():
    weights = in_a_buffer(6, (OUT, IN), torch.float32, gap=0, gap_before=4)
    assert [(first, len(block)) for first, block in experts._runs(weights, joined=True)] == [(0, 4), (4, 2)]
    for first, block in experts._runs(weights, joined=True):
        assert [one.data_ptr() for one in block] == [one.data_ptr() for one in weights[first : first + len(block)]]


def test_neighbours_of_another_storage_are_not_joined():
    whole = torch.zeros(6 * OUT * IN)
    size, itemsize = OUT * IN, whole.element_size()
    parts = [
        torch.frombuffer(whole.numpy()[i * size : (i + 1) * size], dtype=torch.float32).view(OUT, IN) for i in range(6)
    ]
    assert list(accumulate([size * itemsize] * 5)) == [one.data_ptr() - parts[0].data_ptr() for one in parts[1:]]
    assert [len(block) for _, block in experts._runs(parts, joined=True)] == [1] * 6
