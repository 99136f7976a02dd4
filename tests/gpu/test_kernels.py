"""Triton kernels against float64 autograd of the formulas.

`TRITON_INTERPRET=1 python -m pytest tests/gpu/test_kernels.py` runs them without a GPU, where Triton is installed.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.triton_cases import DEVICE, DTYPES, WHERE, assert_near, random

pytestmark = WHERE


def exact(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 100, 2049])
def test_swiglu_and_its_gradient(dtype: torch.dtype, width: int):
    from skyrl_train.kernels import swiglu

    x, up = random(5, 2 * width, dtype=dtype), random(5, width, dtype=dtype, seed=1)
    x64 = exact(x)
    y = F.silu(x64[:, :width]) * x64[:, width:]
    y.backward(up.double())
    assert_near(swiglu.forward(x, None), y.detach(), dtype)
    grad, _ = swiglu.backward(up, x, None)
    assert_near(grad, x64.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_swiglu_and_its_gradients(dtype: torch.dtype):
    from skyrl_train.kernels import swiglu

    x, up, weights = (
        random(7, 96, dtype=dtype),
        random(7, 48, dtype=dtype, seed=1),
        random(7, dtype=torch.float32, seed=2),
    )
    x64, w64 = exact(x), exact(weights)
    y = F.silu(x64[:, :48]) * x64[:, 48:] * w64[:, None]
    y.backward(up.double())
    assert_near(swiglu.forward(x, weights), y.detach(), dtype)
    grad, grad_weights = swiglu.backward(up, x, weights)
    assert_near(grad, x64.grad, dtype)
    assert_near(grad_weights, w64.grad, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "width"), [(1, 64), (300, 128), (37, 100), (9, 2560)])
def test_rms_norm_and_its_gradients(dtype: torch.dtype, num: int, width: int):
    from skyrl_train.kernels import norm

    x, weight, up = (
        random(num, width, dtype=dtype),
        random(width, dtype=dtype, seed=1),
        random(num, width, dtype=dtype, seed=2),
    )
    x64, w64 = exact(x), exact(weight)
    y = x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w64
    y.backward(up.double())
    out, scale = norm.forward(x, weight, 1e-6)
    assert_near(out, y.detach(), dtype)
    grad, grad_weight = norm.backward(up, x, weight, scale)
    assert_near(grad, x64.grad, dtype)
    assert_near(grad_weight, w64.grad, dtype)


def test_rms_norm_of_rows_at_a_distance():
    from skyrl_train.kernels import norm

    wide, weight = random(40, 96, dtype=torch.float32), random(32, dtype=torch.float32, seed=1)
    up = random(40, 32, dtype=torch.float32, seed=2)
    view = wide[:, 32:64]
    for mine, theirs in zip(
        norm.forward(view, weight, 1e-6), norm.forward(view.contiguous(), weight, 1e-6), strict=True
    ):
        assert torch.equal(mine, theirs)
    scale = norm.forward(view, weight, 1e-6)[1]
    whole = norm.backward(up, view.contiguous(), weight, scale)
    for mine, theirs in zip(norm.backward(up, view, weight, scale), whole, strict=True):
        assert torch.equal(mine, theirs)


def rotated(x: Tensor, angle: Tensor, paired_in: bool, paired_out: bool) -> Tensor:
    """As complex numbers."""
    pairs = angle.shape[1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if paired_in else turned.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)[:, None]
    parts = torch.stack([z.real, z.imag], -1).flatten(-2) if paired_out else torch.cat([z.real, z.imag], -1)
    return torch.cat([parts, rest], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("paired_in", "paired_out"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("heads", "size", "pairs"), [(3, 8, 4), (32, 128, 64), (5, 24, 6)])
def test_rotary_embedding_and_its_gradient(
    dtype: torch.dtype, paired_in: bool, paired_out: bool, heads: int, size: int, pairs: int
):
    from skyrl_train.kernels import rotary

    x, up = random(6, heads + 1, size + 8, dtype=dtype), random(6, heads, size, dtype=dtype, seed=1)
    view = x[:, 1:, 8:]  # as a slice of a wider projection
    angle = random(6, pairs, dtype=torch.float32, seed=2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x64 = exact(view)
    y = rotated(x64, angle.double(), paired_in, paired_out)
    y.backward(up.double())
    mine = rotary.rotate(view, cos, sin, paired_in=paired_in, paired_out=paired_out, inverse=False)
    assert_near(mine, y.detach(), dtype)
    grad = rotary.rotate(up, cos, sin, paired_in=paired_out, paired_out=paired_in, inverse=True)
    assert_near(grad, x64.grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(("vocabulary", "padded"), [(53, 56), (9001, 9008)])
def test_logprobs_entropy_and_their_gradient(dtype: torch.dtype, with_entropy: bool, vocabulary: int, padded: int):
    from skyrl_train.kernels.vocabulary import replace_by_gradient, statistics

    logits = 4 * random(9, padded, dtype=dtype)
    logits[0, :50] -= 100.0  # most of a row far below its maximum
    logits[1, vocabulary - 1] = 60.0  # nothing but one word
    labels = torch.randint(0, vocabulary, (9,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    up, up_entropy = random(9, dtype=torch.float32, seed=1), random(9, dtype=torch.float32, seed=2)
    x64 = exact(logits)
    log_p = (x64[:, :vocabulary] / 0.7).log_softmax(-1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logprobs @ up.double() + with_entropy * (entropy @ up_entropy.double())).backward()

    peak, total, product, target = statistics(logits, labels, vocabulary, 0.7, with_entropy=with_entropy)
    mine, log_z = target - total.log(), total.log() + peak
    mine_entropy = total.log() - product / total if with_entropy else torch.zeros_like(total)
    assert_near(mine, logprobs.detach(), torch.float32)
    if with_entropy:
        assert_near(mine_entropy, entropy.detach(), torch.float32)
    ups = up, up_entropy if with_entropy else None
    replace_by_gradient(logits, labels, log_z, mine_entropy, *ups, vocabulary, 0.7)
    assert_near(logits, x64.grad, dtype)
    assert not logits[:, vocabulary:].any()


def test_a_label_of_another_rank_counts_nothing():
    from skyrl_train.kernels.vocabulary import statistics

    logits = random(3, 40, dtype=torch.float32)
    outside = torch.tensor([-1, 40, 1000], device=DEVICE)
    assert not statistics(logits, outside, 40, 1.0, with_entropy=False)[3].any()


def test_no_rows_are_no_work():
    from skyrl_train.kernels import norm, rotary, swiglu, vocabulary

    empty = random(0, 16, dtype=torch.float32)
    weight = random(16, dtype=torch.float32)
    out, scale = norm.forward(empty, weight, 1e-6)
    assert out.shape == (0, 16)
    assert not norm.backward(empty, empty, weight, scale)[1].any()
    assert swiglu.forward(empty, None).shape == (0, 8)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert vocabulary.statistics(empty, none, 16, 1.0, with_entropy=True)[0].shape == (0,)
    angles = random(0, 4, dtype=torch.float32)
    turned = rotary.rotate(
        random(0, 2, 8, dtype=torch.float32), angles, angles, paired_in=False, paired_out=False, inverse=False
    )
    assert turned.shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "gap"), [(8, 0), (9000, 0), (4096, 32), (12301, 7)])
def test_products_are_added_to_matrices_and_what_lies_between_stays(dtype: torch.dtype, size: int, gap: int):
    from skyrl_train.kernels import additions

    buffer, x = random(3 * (size + gap), dtype=torch.float32), random(3, size, dtype=dtype, seed=1)
    expected = buffer.clone()
    expected.view(3, -1)[:, :size] += x.float()
    additions.add(buffer.view(3, -1)[:, :size], x)
    assert torch.equal(buffer, expected)


def test_words_of_many_tensors_are_summed_by_one_kernel_and_each_counts_once(monkeypatch: pytest.MonkeyPatch):
    """In a model's order of long and short tensors; also in several kernels, and of tensors that are not contiguous."""
    from skyrl_train.megatron.weights import word_sums

    shapes = [(2100, 1024), (7,), (128, 8), (0,), (1,), (5, 3), (2, 4)]
    tensors = [
        random(*shape, dtype=dtype, seed=seed).mT if shape == (128, 8) else random(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(shapes)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    words = [8 if tensor.dim() == 2 and tensor.shape[1] % 4 == 0 else tensor.element_size() for tensor in tensors]
    expected = torch.zeros(4, dtype=torch.int64)
    for index, (tensor, size) in enumerate(zip(tensors, words, strict=True)):
        expected[index % 4] += tensor.cpu().contiguous().view(-1).view(word_sums.WORDS[size]).sum()
    launches, launch = [], word_sums.WordSums._launch

    def counted(sums: word_sums.WordSums, size: int) -> None:
        launches.append(size)
        launch(sums, size)

    monkeypatch.setattr(word_sums.WordSums, "_launch", counted)
    for held in (1 << 30, 1000, 0):
        monkeypatch.setattr(word_sums, "HELD_BYTES", held)
        sums = word_sums.WordSums(4, tensors[0].device)
        launches.clear()
        for index, (tensor, size) in enumerate(zip(tensors, words, strict=True)):
            sums.add(index % 4, tensor, size)
        of_each = [size for tensor, size in zip(tensors, words, strict=True) if tensor.numel()]
        assert launches == {1 << 30: [], 1000: [8] * 4, 0: of_each}[held]
        assert torch.equal(sums.total().cpu(), expected)
        assert torch.equal(sums.total().cpu(), expected)
