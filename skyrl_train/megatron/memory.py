"""Gives a rank's device memory back between its turns, and takes it again with every bit as it was.

Megatron's parameters are views of a few flat buffers, the optimizer's float32 shards are views or tensors of their own,
and both sides keep views that nobody lists. So storages are emptied, not tensors replaced: a view of a storage that
was emptied and filled again is a view of the same values. Each storage has its place in pinned host memory, which is
made once and used at every turn. Gradients are not copied: they are zero when they come back.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.device import device_type, empty_cache, synchronize
from skyrl_train.ranks import Moved

WEIGHTS, OPTIMIZER = "weights", "optimizer"
PARTS = (WEIGHTS, OPTIMIZER)
"""`optimizer` is the optimizer's state with the gradients."""
ALIGNMENT = 512
"""Bytes; places in host memory start at a multiple of it."""


class Offloaded(RuntimeError):
    """Something was asked of memory that was given back."""


class DeviceMemory:
    """What the model of this rank, and its optimizer if it has one, keep on the device."""

    def __init__(self, modules: Sequence[nn.Module], optimizer: Any = None) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._host = HostMemory()
        self._away: dict[str, list[_Piece]] = {}
        self._dropped: set[str] = set()

    def offload(self, *parts: str) -> Moved:
        """Copy the parts (all of them by default) to the host and free them on the device; done when it returns.

        Frozen weights are copied once and then only freed.
        """
        started = time.perf_counter()
        leaving = [part for part in parts or PARTS if part not in self._away]
        pieces = {part: list(self._pieces(part)) for part in leaving}
        everything = [piece for part in leaving for piece in pieces[part]]
        num_bytes = self._host.take([piece for piece in everything if piece.is_kept])
        if OPTIMIZER in leaving:
            # Views of the gradients; Megatron makes new ones at every step.
            for parameter in _main_parameters(self._optimizer):
                parameter.grad = None
        for piece in everything:
            piece.storage.resize_(0)
        self._away |= pieces
        empty_cache()
        return Moved(num_bytes, time.perf_counter() - started)

    def reload(self, *parts: str) -> Moved:
        """Bring the parts (all of them by default) back; done when it returns."""
        started = time.perf_counter()
        if dropped := self._dropped.intersection(parts or PARTS):
            raise Offloaded(f"the {' and '.join(sorted(dropped))} of this rank were dropped and cannot come back")
        coming = [part for part in parts or PARTS if part in self._away]
        pieces = [piece for part in coming for piece in self._away[part]]
        for piece in pieces:
            piece.storage.resize_(piece.num_bytes)
        num_bytes = self._host.give([piece for piece in pieces if piece.is_kept])
        for piece in pieces:
            if not piece.is_kept:
                piece.bytes().zero_()
        synchronize()
        for part in coming:
            del self._away[part]
        return Moved(num_bytes, time.perf_counter() - started)

    def drop(self, *parts: str) -> None:
        """Free the parts (all of them by default) without a copy: they never come back to this process."""
        for part in parts or PARTS:
            for piece in self._pieces(part) if part not in self._away else ():
                piece.storage.resize_(0)
            self._away[part] = []
            self._dropped.add(part)
        empty_cache()

    def require(self, what: str, *parts: str) -> None:
        """Raises: Offloaded if one of the parts is not on the device."""
        if missing := [part for part in parts if part in self._away]:
            raise Offloaded(f"{what} needs the {' and '.join(missing)} of this rank, which are offloaded; reload first")

    def forget_frozen(self) -> None:
        """To be called when frozen weights were changed: they are copied again at the next offload."""
        self._host.forget_frozen()

    def _pieces(self, part: str) -> Iterator[_Piece]:
        """Every storage of a part, once; what belongs to the weights is not the optimizer's."""
        seen: set[int] = set()
        weights, frozen = self._weights()
        if part == WEIGHTS:
            yield from _storages(frozen, seen, frozen=True)
            yield from _storages(weights, seen)
            return
        seen.update(_key(tensor) for tensor in (*frozen, *weights))
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
        yield from _storages((one for one in gradients if one is not None), seen, is_kept=False)
        yield from _storages((p.grad for p in parameters if p.grad is not None), seen, is_kept=False)
        yield from _storages(_optimizer_tensors(self._optimizer), seen)

    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that an update may change, and frozen ones that share no storage with them."""
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        changing: list[Tensor] = [parameter for parameter in parameters if parameter.requires_grad]
        changing += [buffer for module in self._modules for buffer in module.buffers()]
        keys = {_key(tensor) for tensor in changing}
        return changing, [p for p in parameters if not p.requires_grad and _key(p) not in keys]


class _Piece:
    """One storage that is given back as a whole."""

    def __init__(self, tensor: Tensor, *, is_kept: bool, is_frozen: bool) -> None:
        self.storage = tensor.untyped_storage()
        self.device, self.num_bytes = tensor.device, self.storage.nbytes()
        self.is_kept, self.is_frozen = is_kept, is_frozen
        """Whether its contents come back; whether they never change."""
        assert self.storage.resizable(), f"a storage of {self.num_bytes} bytes cannot be emptied: another owns it"

    @property
    def key(self) -> int:
        return self.storage._cdata

    def bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)  # type: ignore[call-overload]


class HostMemory:
    """A place in pinned host memory for each storage."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}
        self._current: set[int] = set()
        self._registered: list[int] = []
        weakref.finalize(self, _unregister, self._registered)

    def take(self, pieces: Sequence[_Piece]) -> int:
        """Copy from the device; returns the bytes that had to be copied."""
        self._make_room(pieces)
        moving = [piece for piece in pieces if not (piece.is_frozen and piece.key in self._current)]
        _copy([(self._places[piece.key], piece.bytes()) for piece in moving])
        self._current.update(piece.key for piece in moving)
        return sum(piece.num_bytes for piece in moving)

    def give(self, pieces: Sequence[_Piece]) -> int:
        """Copy to the device; returns the bytes."""
        _copy([(piece.bytes(), self._places[piece.key]) for piece in pieces])
        return sum(piece.num_bytes for piece in pieces)

    def forget_frozen(self) -> None:
        self._current.clear()

    def _make_room(self, pieces: Sequence[_Piece]) -> None:
        missing = [piece for piece in pieces if not self._has_place(piece)]
        if not missing:
            return
        sizes = [-(-piece.num_bytes // ALIGNMENT) * ALIGNMENT for piece in missing]
        arena = self._pinned(sum(sizes))
        for piece, place in zip(missing, arena.split(sizes), strict=True):
            self._places[piece.key] = place[: piece.num_bytes]

    def _has_place(self, piece: _Piece) -> bool:
        place = self._places.get(piece.key)
        return place is not None and len(place) == piece.num_bytes

    def _pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8. torch's own pinned memory would be rounded up to a power of two."""
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        arena = torch.frombuffer(region, dtype=torch.uint8)
        if device_type() == "cuda":
            runtime: Any = torch.cuda.cudart()
            error = runtime.cudaHostRegister(arena.data_ptr(), num_bytes, 0)
            if int(error) != 0:
                raise MemoryError(
                    f"{num_bytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(error)}): the "
                    "machine has too little free, or `ulimit -l` forbids it; with trainer.placement.release=none "
                    "nothing is offloaded"
                )
            self._registered.append(arena.data_ptr())
        return arena


def _unregister(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """target <- source; all have arrived when it returns."""
    if device_type() == "cpu":
        for target, source in pairs:
            target.copy_(source)
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    synchronize()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(
    tensors: Iterable[Tensor], seen: set[int], *, is_kept: bool = True, frozen: bool = False
) -> Iterator[_Piece]:
    """The storages of the tensors that are not in `seen`, to which they are added."""
    for tensor in tensors:
        if _key(tensor) not in seen and tensor.untyped_storage().nbytes() and tensor.device.type == device_type():
            seen.add(_key(tensor))
            yield _Piece(tensor, is_kept=is_kept, is_frozen=frozen)


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
