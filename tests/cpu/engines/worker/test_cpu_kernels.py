"""vLLM on a CPU: rotation of queries and keys against complex numbers, values of draft tokens against a list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

TOKENS, HEADS, SIZE, BESIDE, BASE = 7, 3, 8, 5, 10000.0
"""`BESIDE`: dimensions of a head of latent attention that are not rotated, in front of the others."""
POSITIONS = torch.tensor([0, 1, 2, 3, 9, 4, 31])


@pytest.fixture(scope="module")
def rotary() -> torch.nn.Module:
    """vLLM's layer, as the worker extension leaves it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from skyrl_train.engines.vllm.worker import transfer  # noqa: F401

    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": BASE}
        return get_rope(SIZE, 32, is_neox_style=False, rope_parameters=parameters, dtype=torch.float32)


def rotated(heads: Tensor) -> Tensor:
    """[tokens, heads, SIZE], whose neighbouring dimensions are real and imaginary parts."""
    angles = POSITIONS[:, None] * BASE ** (-torch.arange(0, SIZE, 2) / SIZE)
    turns = torch.polar(torch.ones(()), angles.float())[:, None]
    return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def random_heads(sliced: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Query and the key that all heads share, parts of larger tensors if `sliced`."""
    query = torch.randn(TOKENS, HEADS, BESIDE + SIZE, generator=generator)[..., BESIDE:]
    key = torch.randn(TOKENS, BESIDE + SIZE, generator=generator)[:, BESIDE:].unsqueeze(1)
    return (query, key) if sliced else (query.contiguous(), key.contiguous())


@pytest.mark.parametrize("sliced", [False, True], ids=["contiguous", "slices"])
def test_heads_of_latent_attention_are_rotated_by_their_positions(sliced: bool, rotary: torch.nn.Module):
    query, key = random_heads(sliced, torch.Generator().manual_seed(1))
    expected = rotated(query), rotated(key)
    torch.testing.assert_close(rotary.forward_cpu(POSITIONS, query, key), expected)


def test_flat_queries_are_rotated_in_place_by_the_kernel(rotary: torch.nn.Module):
    heads, shared = random_heads(False, torch.Generator().manual_seed(2))
    query, key = heads.flatten(1), shared.flatten(1)
    expected = rotated(heads).flatten(1), rotated(shared).flatten(1)
    given = rotary.forward_cpu(POSITIONS, query, key)
    torch.testing.assert_close(given, expected)
    assert given[0].data_ptr() == query.data_ptr() and given[1].data_ptr() == key.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_draft_token_has_its_requests_value(dtype: torch.dtype):
    from vllm.v1.sample import rejection_sampler

    from skyrl_train.engines.vllm.worker import transfer  # noqa: F401

    values, counts = torch.tensor([3, 0, 7, 5], dtype=dtype), torch.tensor([2, 1, 0, 3], dtype=torch.int32)
    expand = rejection_sampler.expand_batch_to_tokens
    assert expand(values, counts.cumsum(0), 6, 0, 1).tolist() == [3, 3, 1, 5, 5, 5]
    assert expand(values, counts.cumsum(0), 6).tolist() == [3, 3, 0, 5, 5, 5]
    assert expand(values, counts.cumsum(0), 6).dtype == dtype
