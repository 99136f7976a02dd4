"""Gives a rank's device memory back between its turns, and takes it again with every bit as it was.

Megatron's parameters are views of a few flat buffers, and both it and its optimizer keep views that nobody lists. So
storages are emptied and filled again under their tensors (storages.py); only what one tensor alone holds may get a
storage in common with others. Copies wait in pinned host memory (host_memory.py). Gradients are not copied: they are
zero when they come back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from skyrl_train.device import KernelStacks, empty_cache, synchronize
from skyrl_train.megatron.residency import te_scratch
from skyrl_train.megatron.residency.host_memory import HostMemory
from skyrl_train.megatron.residency.storages import Piece, pieces_of, storage_key
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, Moved

PARTS = (WEIGHTS, OPTIMIZER)


class Offloaded(RuntimeError):
    """Something was asked of memory that was given back."""


class DeviceMemory:
    """What the model of this rank, and its optimizer if it has one, keep on the device."""

    def __init__(self, modules: Sequence[nn.Module], optimizer: Any = None) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._host = HostMemory()
        self._away: dict[str, list[Piece]] = {}
        self._dropped: set[str] = set()
        self._stacks = KernelStacks()

    def offload(self, *parts: str) -> Moved:
        """Copy the parts (all of them by default) to the host and free them on the device; done when it returns.

        Frozen weights are copied once and then only freed.
        """
        started = time.perf_counter()
        self.settle()
        leaving = [part for part in parts or PARTS if part not in self._away]
        pieces = {part: self._pieces(part) for part in leaving}
        everything = [piece for part in leaving for piece in pieces[part]]
        kept = [piece for piece in everything if piece.is_kept]
        num_bytes = self._host.take(kept)
        # Under way until the device is waited for; meanwhile all else goes, the memory of the last step with it.
        if OPTIMIZER in leaving:
            # Views of the gradients; Megatron makes new ones at every step.
            for parameter in _main_parameters(self._optimizer):
                parameter.grad = None
        for piece in everything:
            if not piece.is_kept:
                piece.empty()
        te_scratch.free()
        empty_cache()
        synchronize()
        for piece in kept:
            piece.empty()
        self._away |= pieces
        empty_cache()
        if self._away.keys() == set(PARTS):
            self._stacks.give_back()
        return Moved(num_bytes, time.perf_counter() - started)

    def reload(self, *parts: str) -> Moved:
        """Bring the parts (all of them by default) back.

        Weights are there when it returns. The optimizer is copied while the device computes: `settle` before its use.
        """
        started = time.perf_counter()
        if dropped := self._dropped.intersection(parts or PARTS):
            raise Offloaded(f"the {' and '.join(sorted(dropped))} of this rank were dropped and cannot come back")
        self._stacks.take_again()
        num_bytes = 0
        for part in PARTS:
            if part in (parts or PARTS) and part in self._away:
                num_bytes += self._give(part)
                if part == WEIGHTS:
                    synchronize()
        return Moved(num_bytes, time.perf_counter() - started)

    def settle(self) -> None:
        """What the device is asked from now on finds all that was reloaded. The host does not wait."""
        self._host.settle()

    def drop(self, *parts: str) -> None:
        """Free the parts (all of them by default) without a copy: they never come back to this process."""
        self.settle()
        for part in parts or PARTS:
            for piece in self._pieces(part) if part not in self._away else ():
                piece.empty()
            self._away[part] = []
            self._dropped.add(part)
        te_scratch.free()
        empty_cache()

    def require(self, what: str, *parts: str) -> None:
        """Raises: Offloaded if one of the parts is not on the device."""
        if missing := [part for part in parts if part in self._away]:
            raise Offloaded(f"{what} needs the {' and '.join(missing)} of this rank, which are offloaded; reload first")

    def forget_frozen(self) -> None:
        """To be called when frozen weights were changed: they are copied again at the next offload."""
        self._host.forget_frozen()

    def _give(self, part: str) -> int:
        """Returns the bytes whose copies are under way. If memory runs out, nothing of the part has come back."""
        pieces = self._away[part]
        try:
            num_bytes = self._host.give([piece for piece in pieces if piece.is_kept])
            for piece in pieces:
                if not piece.is_kept:
                    piece.come_back()
                    for _, run in piece.runs():
                        run.zero_()
        except BaseException:
            self.settle()
            for piece in pieces:
                piece.empty()
            raise
        del self._away[part]
        return num_bytes

    def _pieces(self, part: str) -> list[Piece]:
        """Every storage of a part, once; what belongs to the weights is not the optimizer's."""
        seen: set[int] = set()
        changing, frozen = self._weights()
        if part == WEIGHTS:
            # Not the buffers, which a module may replace at any step.
            return pieces_of(frozen, seen, is_frozen=True, may_gather=True) + pieces_of(changing, seen)
        seen.update(storage_key(tensor) for tensor in (*frozen, *changing))
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
        gradients += [parameter.grad for parameter in parameters]
        dropped = pieces_of((one for one in gradients if one is not None), seen, is_kept=False)
        return dropped + pieces_of(_optimizer_tensors(self._optimizer), seen, may_gather=True)

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
    groups = [group for one in torch_optimizers(optimizer) for group in one.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """The optimizer's own parameters (float32 copies of bfloat16 weights) and their state."""
    states = [values for one in torch_optimizers(optimizer) for values in one.state.values()]
    return _main_parameters(optimizer) + [v for values in states for v in values.values() if isinstance(v, Tensor)]
