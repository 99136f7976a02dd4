"""Logprobs and entropy from hidden states over a split vocabulary, against float64 autograd on whole logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyrl_train.megatron.passes import head as heads
from skyrl_train.megatron.passes.head import Head
from skyrl_train.megatron.passes.logprobs import Softmax
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.stores import join_store

VOCABULARY, HIDDEN, TEMPERATURE = 53, 24, 0.7


class OneRank:
    """A tensor-parallel group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def make_head(weight: Tensor, chunk: int | None = 4, recompute: bool | None = True, **changes: Any) -> Head:
    softmax = replace(Softmax(OneRank(), VOCABULARY, TEMPERATURE), **changes)
    return Head(softmax, weight, sequence_parallel=False, chunk=chunk, recompute=recompute)


def make(num: int = 11, vocabulary: int = VOCABULARY, k: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, ids [num, k], and the gradients that arrive at logprobs [num, k] and entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num, HIDDEN, generator=generator)
    weight = 3 * torch.randn(vocabulary, HIDDEN, generator=generator) / HIDDEN**0.5
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:k] for _ in range(num)])
    return hidden, weight, ids, torch.randn(num, k, generator=generator), torch.randn(num, generator=generator)


def exact(hidden: Tensor, weight: Tensor, ids: Tensor, up: Tensor, up_entropy: Tensor) -> list[Tensor]:
    """Logprobs, entropy and the gradients of hidden states and weight in float64, by autograd."""
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (x @ w.t() / TEMPERATURE).log_softmax(-1)
    logprobs = log_p.gather(1, ids)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((logprobs * up.double()).sum() + entropy @ up_entropy.double()).backward()
    assert x.grad is not None and w.grad is not None
    return [logprobs.detach(), entropy.detach(), x.grad, w.grad]


def ours(hidden: Tensor, weight: Tensor, ids: Tensor, up: Tensor, up_entropy: Tensor, **changes: Any) -> list[Tensor]:
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with_entropy = changes.pop("with_entropy", True)
    logprobs, entropy = make_head(w, **changes).logprobs(x, ids, with_entropy=with_entropy)
    ((logprobs * up).sum() + entropy @ up_entropy).backward()
    assert x.grad is not None and w.grad is not None
    return [logprobs.detach(), entropy.detach(), x.grad, w.grad]


@pytest.mark.parametrize("recompute", [True, False, None])
@pytest.mark.parametrize("k", [1, 4])
def test_values_and_gradients_are_those_of_float64_autograd(k: int, recompute: bool | None):
    data = make(k=k)
    for mine, theirs in zip(ours(*data, recompute=recompute), exact(*data), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("chunk", [1, 2, 10, 11, 1000, None])
def test_pieces_change_nothing(chunk: int | None):
    data = make()
    for mine, whole in zip(ours(*data, chunk=chunk), ours(*data, chunk=4), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("free_pieces", [0, 2, 100])
def test_which_logits_are_kept_changes_no_bit(free_pieces: int, monkeypatch: pytest.MonkeyPatch):
    data = make()
    kept = ours(*data, recompute=False)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours(*data, recompute=True), kept, strict=True))
    needed = heads.PIECE_BYTES + 11 * HIDDEN * 4 + free_pieces * 4 * VOCABULARY * 4
    use = {"free": float(needed), "reserved": 0.0, "allocated": 0.0, "total": 0.0}
    monkeypatch.setattr(heads, "memory_in_use", lambda: use)
    monkeypatch.setattr(heads, "_print_choice", lambda num, *rest: counts.append(num))
    counts: list[int] = []
    some = ours(*data, recompute=None)
    assert counts == [min(free_pieces, 3)], "11 positions in pieces of 4"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(some, kept, strict=True))


def test_without_entropy_its_value_and_gradient_are_zero():
    hidden, weight, ids, up, up_entropy = make()
    mine = ours(hidden, weight, ids, up, up_entropy, with_entropy=False)
    logprobs, _, *gradients = exact(hidden, weight, ids, up, torch.zeros_like(up_entropy))
    assert not mine[1].any()
    for ours_, theirs in zip([mine[0], *mine[2:]], [logprobs, *gradients], strict=True):
        torch.testing.assert_close(ours_.double(), theirs, rtol=0, atol=5e-6)


def test_a_frozen_weight_has_no_gradient():
    hidden, weight, ids, up, _ = make()
    x = hidden.clone().requires_grad_()
    logprobs, _ = make_head(weight).logprobs(x, ids, with_entropy=False)
    (logprobs * up).sum().backward()
    assert weight.grad is None and x.grad is not None
    torch.testing.assert_close(x.grad, ours(*make()[:4], torch.zeros(11), with_entropy=False)[2])


def test_the_gradient_is_added_to_megatrons_buffer_once():
    hidden, weight, ids, up, up_entropy = make()
    w = weight.clone().requires_grad_()
    w.main_grad = torch.ones(VOCABULARY, HIDDEN)  # type: ignore[attr-defined]
    w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    fired: list[Any] = []
    w.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad))
    logprobs, entropy = make_head(w).logprobs(hidden, ids, with_entropy=True)
    ((logprobs * up).sum() + entropy @ up_entropy).backward()
    assert len(fired) == 1 and w.grad_added_to_main_grad  # type: ignore[attr-defined]
    expected = exact(hidden, weight, ids, up, up_entropy)[3]
    torch.testing.assert_close(w.main_grad.double() - 1, expected, rtol=0, atol=5e-6)  # type: ignore[attr-defined]


def _on_a_rank(rendezvous: Rendezvous, size: int) -> Any:
    dist.init_process_group(
        "gloo",
        store=join_store(rendezvous),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
    )
    from megatron.core.tensor_parallel import mappings

    mappings.get_tensor_model_parallel_group_if_none = lambda group: group or dist.group.WORLD
    hidden, weight, ids, up, up_entropy = make(k=2)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -VOCABULARY % size), value=50.0)
    shard = padded.chunk(size)[rendezvous.rank].contiguous()
    return ours(hidden, shard, ids, up, up_entropy, group=dist.group.WORLD)


@pytest.mark.parametrize("size", [2, 3])
def test_a_split_vocabulary_gives_the_same_and_its_padding_counts_nowhere(size: int):
    logprobs, entropy, grad_hidden, grad_weight = exact(*make(k=2))
    results = run_on_ranks(_on_a_rank, size, size, timeout_s=60)
    for mine in results:
        torch.testing.assert_close(mine[0].double(), logprobs, rtol=0, atol=5e-6)
        torch.testing.assert_close(mine[1].double(), entropy, rtol=0, atol=5e-6)
        torch.testing.assert_close(mine[2].double(), grad_hidden, rtol=0, atol=5e-6)
    whole = torch.cat([mine[3] for mine in results])
    torch.testing.assert_close(whole[:VOCABULARY].double(), grad_weight, rtol=0, atol=5e-6)
    assert not whole[VOCABULARY:].any()


def test_large_logits_stay_finite():
    hidden, *rest = make()
    for mine, theirs in zip(ours(1e4 * hidden, *rest), exact(1e4 * hidden, *rest), strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=5e-2)


def test_the_likeliest_tokens_are_those_of_whole_logits():
    hidden, weight, ids, *_ = make()
    log_p = (hidden.double() @ weight.double().t() / TEMPERATURE).log_softmax(-1)
    logprobs, found, best = make_head(weight).logprobs_and_topk(hidden, ids[:, 0], 5, num_candidates=40)
    torch.testing.assert_close(logprobs.double(), log_p.gather(1, ids)[:, 0], rtol=0, atol=2e-6)
    expected = log_p[:, :40].topk(5)
    assert torch.equal(found.long(), expected.indices)
    torch.testing.assert_close(best.double(), expected.values, rtol=0, atol=2e-6)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, and the largest sum of bytes of live results."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


TOKENS, WIDE, PIECE = 256, 512, 64


def largest(work: Callable[[Head, Tensor, Tensor], Any], dtype: torch.dtype) -> int:
    hidden, weight, ids, *_ = make(TOKENS, WIDE)
    half = weight.to(dtype).requires_grad_()
    with LargestTensor() as tensors:
        work(make_head(half, chunk=PIECE, vocab_size=WIDE), hidden.to(dtype).requires_grad_(), ids)
    return tensors.elements


def update(head: Head, hidden: Tensor, ids: Tensor) -> None:
    logprobs, entropy = head.logprobs(hidden, ids, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()


@torch.no_grad()
def score(head: Head, hidden: Tensor, ids: Tensor) -> None:
    head.logprobs(hidden, ids, with_entropy=True)


def teach(head: Head, hidden: Tensor, ids: Tensor) -> None:
    head.logprobs_and_topk(hidden, ids[:, 0], 5, WIDE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("work", [update, score, teach])
def test_no_tensor_is_larger_than_the_logits_of_a_piece(work: Any, dtype: torch.dtype):
    assert largest(work, dtype) == PIECE * WIDE


def test_pieces_take_the_documented_memory():
    """Qwen3's vocabulary in float32: logits and two copies, of 588 positions at most, in whole tiles of 256."""
    weight = torch.empty(151_936, 8, device="meta")
    spans = list(make_head(weight, chunk=None).spans(torch.empty(131_072, 8, device="meta"), 1))
    rows = spans[0].stop
    assert rows == 512 and rows * 151_936 * 12 <= heads.PIECE_BYTES < (rows + 256) * 151_936 * 12
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]] and spans[-1].stop == 131_072
