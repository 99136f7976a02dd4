"""Logprobs and entropy over a split vocabulary, against float64 autograd on whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyrl_train.megatron.passes.logprobs import Softmax, vocab_parallel_logprobs
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous

VOCABULARY = 53
TEMPERATURE = 0.7


class OneRank:
    """A tensor-parallel group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


SOFTMAX = Softmax(OneRank(), VOCABULARY, TEMPERATURE, chunk=4)


def make(num: int = 11, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits, labels, and the gradients that arrive at logprobs and entropy"""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (num,), generator=generator)
    return logits, labels, torch.randn(num, generator=generator), torch.randn(num, generator=generator)


def exact(logits: Tensor, labels: Tensor, up: Tensor, up_entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and the logits' gradient in float64, by autograd."""
    x = logits.double().requires_grad_()
    log_p = (x / TEMPERATURE).log_softmax(-1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logprobs @ up.double() + entropy @ up_entropy.double()).backward()
    assert x.grad is not None
    return logprobs.detach(), entropy.detach(), x.grad


def ours(logits: Tensor, labels: Tensor, up: Tensor, up_entropy: Tensor, group: Any = None, **changes: Any) -> Any:
    x = logits.clone().requires_grad_()
    with_entropy = changes.pop("with_entropy", True)
    softmax = replace(SOFTMAX, group=group or OneRank(), **changes)
    logprobs, entropy = vocab_parallel_logprobs(x, labels, softmax, with_entropy=with_entropy)
    (logprobs @ up + entropy @ up_entropy).backward()
    return logprobs.detach(), entropy.detach(), x.grad


def test_values_and_gradients_are_those_of_float64_autograd():
    data = make()
    for mine, theirs in zip(ours(*data), exact(*data), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 2, 10, 11, 1000])
def test_chunks_change_nothing(chunk: int):
    data = make()
    for mine, whole in zip(ours(*data, chunk=chunk), ours(*data, chunk=4), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-6, atol=1e-7)


def test_without_entropy_its_value_and_gradient_are_zero():
    logits, labels, up, up_entropy = make()
    logprobs, entropy, grad = ours(logits, labels, up, up_entropy, with_entropy=False)
    expected = exact(logits, labels, up, torch.zeros_like(up_entropy))
    assert not entropy.any()
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected[2], rtol=0, atol=2e-6)


def _on_a_rank(rendezvous: Rendezvous, size: int) -> Any:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{rendezvous.address}:{rendezvous.port}",
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
    )
    logits, labels, up, up_entropy = make()
    padded = torch.nn.functional.pad(logits, (0, -VOCABULARY % size), value=50.0)
    shard = padded.chunk(size, dim=1)[rendezvous.rank].contiguous()
    return ours(shard, labels, up, up_entropy, group=dist.group.WORLD)


@pytest.mark.parametrize("size", [2, 3])
def test_a_split_vocabulary_gives_the_same_and_its_padding_counts_nowhere(size: int):
    logprobs, entropy, grad = exact(*make())
    results = run_on_ranks(_on_a_rank, size, size, timeout_s=60)
    for mine in results:
        torch.testing.assert_close(mine[0].double(), logprobs, rtol=0, atol=2e-6)
        torch.testing.assert_close(mine[1].double(), entropy, rtol=0, atol=2e-6)
    whole = torch.cat([mine[2] for mine in results], dim=1)
    torch.testing.assert_close(whole[:, :VOCABULARY].double(), grad, rtol=0, atol=2e-6)
    assert not whole[:, VOCABULARY:].any()


def test_large_logits_stay_finite():
    logits, labels, up, up_entropy = make()
    for mine, theirs in zip(
        ours(1e4 * logits, labels, up, up_entropy), exact(1e4 * logits, labels, up, up_entropy), strict=True
    ):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-2)


def test_the_logits_are_not_modified():
    logits, labels, *_ = make()
    before, version = logits.clone(), logits._version
    x = logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(x, labels, SOFTMAX, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(x.detach(), before) and x._version == version


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that any operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                self.elements = max(self.elements, leaf.numel())
        return out


def test_no_float32_tensor_is_larger_than_a_chunk_of_logits():
    num, vocabulary, chunk = 256, 512, 8
    logits, labels, up, up_entropy = make(num, vocabulary)
    half = logits.bfloat16()
    with LargestFloat32() as largest:
        *_, grad = ours(half, labels, up, up_entropy, chunk=chunk, vocab_size=vocabulary)
    assert grad.dtype == torch.bfloat16
    assert largest.elements == chunk * vocabulary
    with LargestFloat32() as whole:
        ours(half, labels, up, up_entropy, chunk=num, vocab_size=vocabulary)
    assert whole.elements == num * vocabulary, "the measurement sees the backward and forward pass"
