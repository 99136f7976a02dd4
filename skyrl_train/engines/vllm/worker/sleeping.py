"""Tensors that no weight update brings, saved while an engine's weights are dropped.

vLLM (0.26 to 0.32) saves the model's registered buffers. Plain attributes of a layer, or of its attention or
quantisation method, are in the same memory and would come back as garbage (vllm#16564, vllm#29341).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

KV_CACHES = ("kv_cache", "kv_caches")
"""Attributes that hold the KV cache, whose contents a sleep discards."""


class Unsynced:
    """Copies of those tensors in host memory."""

    def __init__(self, model: nn.Module) -> None:
        dropped = [tensor for tensor in plain_tensors(model) if not tensor.is_cuda or _is_dropped(tensor)]
        self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in dropped]

    def restore(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors held by attributes, each storage once and flat, that share no memory with a parameter or a buffer."""
    seen = {_storage(tensor) for tensor in chain(model.parameters(), model.buffers())}
    found = []
    for module in model.modules():
        for tensor in _attributes(module):
            if tensor.numel() and not tensor.is_meta and _storage(tensor) not in seen:
                seen.add(_storage(tensor))
                storage = tensor.untyped_storage()
                found.append(tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0))
    return found


def _attributes(module: nn.Module) -> Iterator[Tensor]:
    """Tensors of the module and of the plain objects that it holds."""
    for name, value in vars(module).items():
        if name in KV_CACHES:
            continue
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            yield from (item for key, item in vars(value).items() if isinstance(item, Tensor) and key not in KV_CACHES)


def _is_dropped(tensor: Tensor) -> bool:
    """Whether a sleep unmaps this memory."""
    address = tensor.data_ptr()
    return any(
        block.tag == "weights" and start <= address < start + block.handle[1] for start, block in _allocations().items()
    )


def sleepable_bytes() -> dict[str, float]:
    """Bytes by vLLM's tag ("weights", "kv_cache"), asleep or not, of a worker that was started with sleep mode."""
    found: dict[str, float] = {}
    for block in _allocations().values():
        found[block.tag] = found.get(block.tag, 0.0) + block.handle[1]
    return found


def _allocations() -> dict[int, Any]:
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance().pointer_to_data  # type: ignore[attr-defined]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
