"""Direct copies of received tensors into the parameters of a running model.

vLLM's layerwise reload (layerwise.py) supports every model, at about a millisecond per layer. If a model's kernels read
weights in the checkpoint's form (unquantised, on a GPU), its loaders only copy. A `CopyPlan` holds these copies. It is
found by running the loaders once without letting them write, and used only after a layerwise update has shown, byte for
byte, that the parameters hold what the plan would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.weight_sync.bucket import Specs, TensorSpec, fill, num_bytes
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import name_list, row_hashes

IGNORED_WRITES = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""Loaders zero the rows of vocabulary padding, which are zero already."""


class NoPlanError(RuntimeError):
    """This model's loaders do more than copy."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A loader's copy from a part of a received tensor into a part of a parameter."""

    target: Tensor
    """A view of the live parameter."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset in the received tensor, in elements."""

    def source(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class CopyPlan:
    """The copies for each tensor of an update."""

    def __init__(self, copies: Mapping[str, Sequence[Copy]], model: nn.Module) -> None:
        self.copies = copies
        self._places = [
            (module._parameters, name, _storage(parameter))
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._loaded: set[str] = set()

    @property
    def is_current(self) -> bool:
        """Whether the model's parameters still are where the plan writes to. Asked while generation is paused: another
        walk through the modules of a large model would take milliseconds.
        """
        found = ((held.get(name), place) for held, name, place in self._places)
        return all(parameter is not None and _storage(parameter) == place for parameter, place in found)

    def begin(self) -> None:
        self._loaded = set()

    def load(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """Copy the tensors of one bucket, and keep no reference to them.
        Raises: WeightSyncError for an unknown or repeated name.
        """
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, tensor in named_tensors:
            if name in self._loaded or name not in self.copies:
                what = "arrived twice in one weight update" if name in self._loaded else "was not in the first update"
                raise WeightSyncError(f"tensor {name!r} {what}")
            self._loaded.add(name)
            for copy in self.copies[name]:
                targets.append(copy.target)
                sources.append(copy.source(tensor))
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def faults(self) -> list[str]:
        """Sentences about what is missing in the update."""
        missing = sorted(self.copies.keys() - self._loaded)
        return [f"{len(missing)} tensors of the first update are missing: {name_list(missing)}"] if missing else []


class PlanCheck:
    """Compares a layerwise update with what a plan would have written, by the hashes of all rows. They stay on the
    device (8 bytes per KiB of weights), and only the result is waited for.
    """

    def __init__(self, plan: CopyPlan) -> None:
        self._plan = plan
        self._watched: list[tuple[list[str], Specs, Tensor]] = []
        """Per bucket: names, the parts that the plan would have copied, the hashes of their rows."""

    def watch(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """To be called with the tensors of each bucket before they are loaded."""
        known = [(name, tensor) for name, tensor in named_tensors if name in self._plan.copies]
        parts = [copy.source(tensor) for name, tensor in known for copy in self._plan.copies[name]]
        if parts:
            self._watched.append(([name for name, _ in known], *_hashes(parts)))

    def passed(self) -> bool:
        """Whether, after the update, the model's parameters hold exactly the watched bytes."""
        names = [name for watched, _, _ in self._watched for name in watched]
        copies = self._plan.copies
        if not self._plan.is_current or len(names) != len(copies) or set(names) != copies.keys():
            return False
        differ = []
        for watched, specs, hashes in self._watched:
            held_specs, held = _hashes([copy.target for name in watched for copy in copies[name]])
            if held_specs != specs:
                return False
            differ.append((held != hashes).any())
        return not differ or not bool(torch.stack(differ).any())


def find_plan(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    expected_elements: Callable[[nn.Module], int],
    aliases: Mapping[str, str],
) -> CopyPlan:
    """Find the copies by which `model` loads tensors of these specs.

    Args: expected_elements: number of elements that a module's own parameters load from a checkpoint; aliases: modules
        that share the parameters of another.
    Raises: NoPlanError if a loader does more than copy, or a parameter is not written exactly once.
    """
    copies = _observe(model, specs)
    unused = [name for name, some in copies.items() if not some]
    if unused:
        raise NoPlanError(f"the loaders do not use {name_list(unused)}")
    _check_coverage(model, copies, expected_elements, aliases)
    return CopyPlan(copies, model)


def _observe(model: nn.Module, specs: Sequence[TensorSpec]) -> dict[str, list[Copy]]:
    """Run the loaders on tensors without content and record their writes."""
    tensors = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
    observer = _Observer(model, tensors)
    try:
        with observer, torch.no_grad():
            model.load_weights(iter(tensors.items()))  # type: ignore[operator]
    except NoPlanError:
        raise
    except Exception as error:  # any error that a loader raises for tensors without content
        raise NoPlanError(f"the model's loaders read the values of weights: {error}") from error
    return observer.copies


class _Observer(TorchDispatchMode):
    """Records copies into parameters instead of executing them."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parameters = _storages(model)
        self._names = {_storage(tensor): name for name, tensor in tensors.items()}
        self.copies: dict[str, list[Copy]] = {name: [] for name in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        writes = func._schema.is_mutable and target is not None and _storage(target) in self._parameters
        if not writes:
            return func(*args, **(kwargs or {}))
        assert target is not None
        if func in IGNORED_WRITES:
            return target
        if func is not torch.ops.aten.copy_.default:
            raise NoPlanError(f"a loader changes a parameter by {func}")
        name = self._names.get(_storage(args[1]))
        if name is None or target.shape != args[1].shape or target.dtype != args[1].dtype:
            raise NoPlanError("a loader copies something other than a part of a received tensor")
        source = args[1]
        self.copies[name].append(
            Copy(target.detach(), tuple(source.shape), tuple(source.stride()), source.storage_offset())
        )
        return target


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(model: nn.Module) -> set[int]:
    return {_storage(parameter) for parameter in model.parameters()}


def _check_coverage(
    model: nn.Module,
    copies: Mapping[str, Sequence[Copy]],
    expected_elements: Callable[[nn.Module], int],
    aliases: Mapping[str, str],
) -> None:
    """Raise unless every element of a checkpoint's parameters is written exactly once."""
    by_storage: dict[int, list[Tensor]] = {}
    for some in copies.values():
        for copy in some:
            by_storage.setdefault(_storage(copy.target), []).append(copy.target)
    for name, module in model.named_modules():
        written = 0
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            targets = by_storage.get(_storage(parameter), [])
            if _overlap(targets, parameter):
                raise NoPlanError(f"the loaders write parts of {name} twice")
            written += sum(target.numel() for target in targets)
        if written != expected_elements(module) and name not in aliases:
            raise NoPlanError(f"the loaders write {written} of {expected_elements(module)} elements of {name}")


def _overlap(targets: Sequence[Tensor], parameter: Tensor) -> bool:
    if len(targets) < 2:
        return False
    storage = parameter.untyped_storage()
    seen = torch.zeros(storage.nbytes() // parameter.element_size(), dtype=torch.uint8, device=parameter.device)
    for target in targets:
        seen.as_strided(target.size(), target.stride(), target.storage_offset()).add_(1)
    return bool((seen > 1).any())


def _hashes(parts: Sequence[Tensor]) -> tuple[Specs, Tensor]:
    """Dtypes and shapes of the parts, and the hashes of their rows, for which a bucket of them is made."""
    specs = tuple(TensorSpec("", part.dtype, tuple(part.shape)) for part in parts)
    buffer = torch.empty(num_bytes(specs), dtype=torch.uint8, device=parts[0].device)
    return specs, row_hashes(fill(specs, parts, buffer).data)
