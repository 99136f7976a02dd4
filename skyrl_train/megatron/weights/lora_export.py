"""Adapters on their way out: folded into the weights, or whole under PEFT's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.hf import adapter
from skyrl_train.megatron.lora.adapters import Lora, base_weights
from skyrl_train.megatron.weights.export import Read, check_writable, is_stage_owner, require_tensors, write_together
from skyrl_train.megatron.weights.gather_plain import gather_bytes
from skyrl_train.weight_sync.bucket import TensorSpec


def merged(lora: Lora) -> Read:
    """What `export` reads of a weight to get W + alpha / r * B A, added in float32 and rounded once.

    The adapters of this rank's part of a weight are all that it takes: no collective.
    """
    deltas: dict[int, Callable[[], Tensor]] = {}
    for layer, one in lora.adapters:
        for index, weight in enumerate(base_weights(layer)):
            deltas[id(weight)] = lambda one=one, index=index: one.delta(index)  # type: ignore[misc]

    def read(tensor: Tensor) -> Tensor:
        weight, delta = tensor.detach(), deltas.get(id(tensor))
        return weight if delta is None else (weight.float() + delta()).to(weight.dtype)

    return read


def export_adapter(
    lora: Lora, read: Callable[[Tensor], Tensor] = lambda tensor: tensor.detach()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT's name, whole tensor) of this stage's adapters, on every rank of the stage. A collective over it."""
    for _, one in lora.adapters:
        for module, a, b in one.factors(read):
            yield from zip(adapter.tensor_names(module), (a, b), strict=True)


def adapter_specs(lora: Lora, dtype: torch.dtype) -> list[TensorSpec]:
    """Names, dtypes and shapes of what `export_adapter` yields on this stage, without a collective."""
    specs = []
    for _, one in lora.adapters:
        for module, a, b in one.shapes():
            specs += [
                TensorSpec(name, dtype, shape) for name, shape in zip(adapter.tensor_names(module), (a, b), strict=True)
            ]
    return specs


def save_adapter(lora: Lora, target: str, folder: str, base_model: str) -> None:
    """Write one adapter of all stages in PEFT's format. A collective over all ranks.

    Args: folder has the base model, base_model is its name as the configuration gives it.
    Raises: ValueError on every rank if it cannot be written; no rank is left waiting.
    """
    owner = is_stage_owner()
    writes = owner and parallel_state.get_pipeline_model_parallel_rank() == 0
    write_together(target, lambda: check_writable(Path(target)) if writes else None)
    tensors = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in export_adapter(lora)
        if owner
    }
    stages: list[bytes] = []
    if owner:
        stages = gather_bytes(safetensors.torch.save(tensors), parallel_state.get_pipeline_model_parallel_group())

    def write() -> None:
        if writes:
            whole = {name: tensor for stage in stages for name, tensor in safetensors.torch.load(stage).items()}
            adapter.save(target, whole, folder, base_model, lora.config)
            require_tensors(Path(target) / adapter.TENSORS_FILE, whole)

    write_together(target, write)
