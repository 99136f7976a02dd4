"""Export of adapters: folded into the weights, or alone under PEFT's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from skyrl_train.hf import adapter as peft
from skyrl_train.megatron.lora.adapters import Lora, base_weights
from skyrl_train.megatron.weights.export import Read
from skyrl_train.weight_sync.bucket import TensorSpec


def merged(lora: Lora | None) -> Read:
    """A `read` for `export` that returns W + alpha / r * B A, added in float32 and rounded once; W without adapters. It
    needs only the adapters of this rank's part of a weight: no collective."""
    deltas: dict[int, Callable[[], Tensor]] = {}
    for layer, adapter in lora.adapters if lora else ():
        for index, weight in enumerate(base_weights(layer)):
            deltas[id(weight)] = lambda adapter=adapter, index=index: adapter.delta(index)  # type: ignore[misc]

    def read(tensor: Tensor) -> Tensor:
        weight, delta = tensor.detach(), deltas.get(id(tensor))
        return weight if delta is None else (weight.float() + delta()).to(weight.dtype)

    return read


def export_adapter(
    lora: Lora, read: Callable[[Tensor], Tensor] = lambda tensor: tensor.detach()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT's name, whole tensor) of this stage's adapters, on every rank of the stage. A collective over it."""
    for _, adapter in lora.adapters:
        for module, a, b in adapter.factors(read):
            yield from zip(peft.tensor_names(module), (a, b), strict=True)


def adapter_specs(lora: Lora, dtype: torch.dtype) -> list[TensorSpec]:
    """Names, dtypes and shapes of what `export_adapter` yields on this stage, without a collective."""
    shapes = [shapes for _, adapter in lora.adapters for shapes in adapter.shapes()]
    return [
        TensorSpec(name, dtype, shape)
        for module, a, b in shapes
        for name, shape in zip(peft.tensor_names(module), (a, b), strict=True)
    ]
