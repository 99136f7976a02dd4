"""Which layers of vLLM's models derive something from weights that are copied into them directly."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.v1.attention.backend import AttentionImpl

from skyrl_train.engines.vllm.worker.update import derives


class Plain(AttentionImpl):
    def __init__(self) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


class KeepsSinks(Plain):
    def process_weights_after_loading(self, act_dtype: Any) -> None: ...


class KeepsMore(Attention):
    def process_weights_after_loading(self, act_dtype: Any) -> None: ...


def layer(kind: type[nn.Module], impl: AttentionImpl) -> nn.Module:
    """A layer without weights; a whole one needs a running engine's configuration."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.impl = impl  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (layer(Attention, Plain()), False),
        (layer(ChunkedLocalAttention, Plain()), False),
        (layer(Attention, KeepsSinks()), True),
        (layer(KeepsMore, Plain()), True),
        (layer(MLAAttention, Plain()), True),
        (nn.Linear(2, 2), False),
    ],
)
def test_only_layers_that_derive_something_are_processed_again(module: nn.Module, expected: bool):
    assert derives(module) is expected
