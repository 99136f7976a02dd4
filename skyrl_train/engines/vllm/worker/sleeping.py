"""What an engine must not lose when its weights are dropped: tensors that no weight update brings.

vLLM (0.26 to 0.32) itself saves the model's registered buffers. Tensors that are plain attributes of a layer, or of
its attention or quantisation method, lie in the same memory and would come back as garbage (vllm#16564, vllm#29341).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

KV_CACHES = ("kv_cache", "kv_caches")
"""Attributes that hold the KV cache, whose contents nobody needs after a sleep."""


class Unsynced:
    """Copies of those tensors in host memory."""

    def __init__(self, model: nn.Module) -> None:
        lost = [tensor for tensor in plain_tensors(model) if not tensor.is_cuda or _lies_with_weights(tensor)]
        self._copies = [(tensor, tensor.to("cpu", copy=True)) for tensor in lost]

    def restore(self) -> None:
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def plain_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors held by attributes, each storage once, that share no memory with a parameter or a buffer."""
    seen = {_storage(tensor) for tensor in chain(model.parameters(), model.buffers())}
    found = []
    for module in model.modules():
        for tensor in _attributes(module):
            if tensor.numel() and not tensor.is_meta and _storage(tensor) not in seen:
                seen.add(_storage(tensor))
                found.append(_whole(tensor))
    return found


def _attributes(module: nn.Module) -> Iterator[Tensor]:
    """Of the module, and of the plain objects that it holds."""
    for name, value in vars(module).items():
        if name in KV_CACHES:
            continue
        if isinstance(value, Tensor):
            yield value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
            yield from (one for key, one in vars(value).items() if isinstance(one, Tensor) and key not in KV_CACHES)


def _lies_with_weights(tensor: Tensor) -> bool:
    """Whether a sleep empties this memory and `wake_weights` maps it again."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocations: Any = get_mem_allocator_instance().pointer_to_data
    address = tensor.data_ptr()
    return any(one.tag == "weights" and start <= address < start + one.handle[1] for start, one in allocations.items())


def sleepable_bytes() -> dict[str, float]:
    """Of this worker, which was started with sleep mode, by vLLM's tag ("weights", "kv_cache"), asleep or not."""
    from vllm.device_allocator import get_mem_allocator_instance

    found: dict[str, float] = {}
    allocations: Any = get_mem_allocator_instance().pointer_to_data
    for one in allocations.values():
        found[one.tag] = found.get(one.tag, 0.0) + one.handle[1]
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _whole(tensor: Tensor) -> Tensor:
    """All of the tensor's storage, flat."""
    storage = tensor.untyped_storage()
    return tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
