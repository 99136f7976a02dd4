"""Offloads a rank's weights and optimizer state and restores them bit for bit.

Megatron's parameters are views of a few flat buffers, and both it and its optimizer keep views that are listed nowhere.
So storages are freed and allocated again under their tensors (storages.py); only tensors that own their storage may be
merged into one. Contents wait in pinned host memory (host_memory.py). Gradients are not copied: they are zero when they
come back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from skyrl_train.device import synchronize
from skyrl_train.device.memory import empty_cache
from skyrl_train.megatron.residency.host_memory import HostMemory
from skyrl_train.megatron.residency.storages import StorageBlock, storage_blocks, storage_key
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, Moved

PARTS = (WEIGHTS, OPTIMIZER)


class Offloaded(RuntimeError):
    """A part that is needed on the device was offloaded."""


class DeviceMemory:
    """Device memory of this rank's model, and of its optimizer if it has one."""

    def __init__(self, modules: Sequence[nn.Module], optimizer: Any = None) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._host = HostMemory()
        self._offloaded: dict[str, list[StorageBlock]] = {}

    def offload(self, *parts: str) -> Moved:
        """Copy the parts (all of them by default) to the host and free them on the device; done when it returns. Frozen
        weights are copied once and then only freed.
        """
        started = time.perf_counter()
        self.settle()
        leaving = [part for part in parts or PARTS if part not in self._offloaded]
        blocks = {part: self._blocks(part) for part in leaving}
        everything = [block for part in leaving for block in blocks[part]]
        kept = [block for block in everything if block.is_kept]
        num_bytes = self._host.save(kept)
        # Everything else is freed while the copies run, the memory of the last step included.
        if OPTIMIZER in leaving:
            # Views of the gradients; Megatron makes new ones at every step.
            for parameter in _main_parameters(self._optimizer):
                parameter.grad = None
        for block in everything:
            if not block.is_kept:
                block.free()
        free_te_scratch()
        self._free_rotary_tables()
        empty_cache()
        synchronize()
        for block in kept:
            block.free()
        self._offloaded |= blocks
        empty_cache()
        return Moved(num_bytes, time.perf_counter() - started)

    def _free_rotary_tables(self) -> None:
        """Megatron keeps those of the last 32 lengths, 2 GiB with samples of 128k tokens."""
        for module in (each for root in self._modules for each in root.modules()):
            if (clear := getattr(module.forward, "cache_clear", None)) is not None:
                clear()

    def reload(self, *parts: str) -> Moved:
        """Restore the parts (all of them by default). Weights are complete when it returns. The optimizer is copied
        while the device computes: `settle` before its use.
        """
        started = time.perf_counter()
        num_bytes = 0
        for part in PARTS:
            if part in (parts or PARTS) and part in self._offloaded:
                num_bytes += self._restore(part)
                if part == WEIGHTS:
                    synchronize()
        return Moved(num_bytes, time.perf_counter() - started)

    def settle(self) -> None:
        """Have later work of the device begin after what is being reloaded. The host does not wait."""
        self._host.settle()

    def require(self, method: str, *parts: str) -> None:
        """Raises: Offloaded if one of the parts is not on the device."""
        if missing := [part for part in parts if part in self._offloaded]:
            raise Offloaded(
                f"{method} needs the {' and '.join(missing)} of this rank, which are offloaded; reload first"
            )

    def forget_frozen(self) -> None:
        """Copy frozen weights again at the next offload, because they were changed."""
        self._host.forget_frozen()

    def _restore(self, part: str) -> int:
        """Return the bytes whose copies are under way. If memory runs out, all of the part stays offloaded."""
        blocks = self._offloaded[part]
        try:
            num_bytes = self._host.restore([block for block in blocks if block.is_kept])
            for block in blocks:
                if not block.is_kept:
                    block.allocate()
                    for _, data in block.parts():
                        data.zero_()
        except BaseException:
            self.settle()
            for block in blocks:
                block.free()
            raise
        del self._offloaded[part]
        return num_bytes

    def _blocks(self, part: str) -> list[StorageBlock]:
        """Every storage of a part, once; storages of the weights are not the optimizer's."""
        seen: set[int] = set()
        changing, frozen = self._weights()
        if part == WEIGHTS:
            # Not the buffers, which a module may replace at any step.
            return storage_blocks(frozen, seen, is_frozen=True, may_merge=True) + storage_blocks(changing, seen)
        seen.update(storage_key(tensor) for tensor in (*frozen, *changing))
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
        gradients += [parameter.grad for parameter in parameters]
        dropped = storage_blocks((gradient for gradient in gradients if gradient is not None), seen, is_kept=False)
        return dropped + storage_blocks(_optimizer_tensors(self._optimizer), seen, may_merge=True)

    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that an update may change, and frozen ones that share no storage with them."""
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        changing: list[Tensor] = [parameter for parameter in parameters if parameter.requires_grad]
        changing += [buffer for module in self._modules for buffer in module.buffers()]
        keys = {storage_key(tensor) for tensor in changing}
        return changing, [p for p in parameters if not p.requires_grad and storage_key(p) not in keys]


def torch_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside Megatron's; a rank without parameters of a kind has a stub without one."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part is not None and part.optimizer is not None]


def _main_parameters(optimizer: Any) -> list[Tensor]:
    groups = [group for part in torch_optimizers(optimizer) for group in part.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """The optimizer's own parameters (float32 copies of bfloat16 weights) and their state."""
    states = [values for part in torch_optimizers(optimizer) for values in part.state.values()]
    return _main_parameters(optimizer) + [v for values in states for v in values.values() if isinstance(v, Tensor)]


def free_te_scratch() -> None:
    """Free what Transformer Engine (names of 2.20) keeps on the device between steps, if it was imported.

    Stand-ins for gradients that were added to Megatron's buffer, and cuBLAS's workspaces: 0.15 GiB with a policy of
    half a billion parameters. Its next step makes them again.
    """
    te = "transformer_engine.pytorch"
    getattr(sys.modules.get(f"{te}.module.base"), "_dummy_wgrads", {}).clear()
    for name in ("get_cublas_workspace", "_get_grouped_cublas_workspace"):
        workspace = getattr(sys.modules.get(f"{te}.cpp_extensions.gemm"), name, None)
        getattr(workspace, "cache_clear", lambda: None)()
