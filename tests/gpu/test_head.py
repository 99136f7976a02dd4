"""The output layer in pieces on a GPU: values against float64, the same bits with kept logits, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.megatron.passes.head import Head
from skyrl_train.megatron.passes.logprobs import Softmax
from tests.support.triton_cases import assert_near, random

pytestmark = pytest.mark.gpus(1)
VOCABULARY, HIDDEN = 5003, 256
GIB = 2**30


class OneRank:
    """A tensor-parallel group of this process alone."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def update(hidden: Tensor, weight: Tensor, ids: Tensor, **changes: Any) -> list[Tensor]:
    """Logprobs, entropy and the gradients of hidden states and of the weight, the last in Megatron's float32 buffer."""
    softmax = Softmax(OneRank(), changes.pop("vocab_size", VOCABULARY), temperature=0.7)  # type: ignore[arg-type]
    x, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    w.main_grad = torch.zeros_like(w, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]
    w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    head = Head(softmax, w, sequence_parallel=False, **{"chunk": 100, "recompute": True, **changes})
    logprobs, entropy = head.logprobs(x, ids, with_entropy=True)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return [logprobs.detach(), entropy.detach(), x.grad, w.main_grad]  # type: ignore[list-item,attr-defined]


def data(k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    hidden = random(333, HIDDEN, dtype=torch.bfloat16)
    weight = random(VOCABULARY + 5, HIDDEN, dtype=torch.bfloat16, seed=1) / HIDDEN**0.5
    ids = torch.stack([torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(i))[:k] for i in range(333)])
    return hidden, weight, ids.cuda()


@pytest.mark.parametrize("k", [1, 5])
def test_values_and_gradients_are_those_of_float64(k: int):
    hidden, weight, ids = data(k)
    x, w = (tensor.double().requires_grad_() for tensor in (hidden, weight))
    log_p = (x @ w[:VOCABULARY].t() / 0.7).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, ids), -(log_p.exp() * log_p).sum(-1)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    mine = update(hidden, weight, ids)
    for ours, exact in zip(mine, (logprobs.detach(), entropy.detach(), x.grad, w.grad), strict=True):
        assert exact is not None
        assert_near(ours, exact, torch.bfloat16)
    assert not mine[3][VOCABULARY:].any()


@pytest.mark.parametrize("recompute", [False, None])
def test_keeping_logits_changes_no_bit(recompute: bool | None):
    kept, again = update(*data(), recompute=recompute), update(*data())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, again, strict=True))


def test_qwen3_4b_takes_less_than_two_gib_beside_hidden_states_and_weight():
    tokens, vocabulary, size = 65_536, 151_936, 2560
    hidden = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(vocabulary, size, dtype=torch.bfloat16, device="cuda") / size**0.5
    ids = torch.randint(0, vocabulary, (tokens, 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() + weight.numel() * 4  # Megatron's gradient
    update(hidden, weight, ids, chunk=None, vocab_size=vocabulary)
    peak = torch.cuda.max_memory_allocated() - before
    gradient = hidden.nbytes
    assert gradient < peak < gradient + 1.05 * GIB
    assert peak + gradient < 2 * GIB, "with 131,072 tokens it is one gradient of this size more"
