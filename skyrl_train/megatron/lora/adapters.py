"""LoRA on Megatron's linear layers: the adapters, how they are sharded, and the switch that disables them.

Megatron computes several Hugging Face modules in one layer (q, k and v; gate and up). Each has its own A and B, as in
PEFT, so gradients and files are PEFT's. An adapter is the child `lora` of the layer it adapts.

Legend: r rank, P adapted modules of the layer, E local experts (1 elsewhere). `lora_A` [E, P, r, in] and `lora_B`
[E, out, r]. A row of B belongs to the module of the same row of the weight.

Shards, and reduction of the gradients:
- column parallel: B is sharded along its rows like the weight. A is replicated; under sequence parallelism each rank
  has its own tokens, so Megatron sums A's gradient over the tensor group.
- row parallel: A is sharded along its input. B is replicated and gets the sum over the tensor group.
- experts under expert-tensor parallelism: the token dispatcher sums the layer's partial outputs, so the gradient of
  the replicated factor is partial; `Lora.reduce_gradients` sums it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from skyrl_train.config.policy import LoraConfig, SyncedLoraConfig
from skyrl_train.megatron.layers.expert_rows import ExpertRows
from skyrl_train.megatron.layers.experts import grouped_linear
from skyrl_train.megatron.layers.norm import rms_norm
from skyrl_train.megatron.lora.dropout import OF_EXPERT_TENSOR_RANKS, OF_TENSOR_RANKS, OF_THIS_RANK, drop
from skyrl_train.megatron.weights.gather import gather_parts, join_parts, shard_group

MAX_THREADS = 8
"""Threads of a rank that make the initial factors of a layer's experts."""
Factors = Callable[[str], tuple[Tensor, Tensor]]
"""Hugging Face module -> whole A [r, in] and B [out, r]."""


@dataclass(slots=True)
class Switch:
    """Switches of all adapters of a model."""

    enabled: bool = True
    """False: the base model."""
    dropping: bool = False
    """True in training passes only."""


@dataclass(frozen=True, slots=True)
class Site:
    """The layer of an adapter."""

    modules: tuple[tuple[str, ...], ...]
    """The adapted Hugging Face modules, in the order of their rows; per expert of the model, or once."""
    part_of_row: Tensor
    """[out] int64 over the rows of the whole layer: index into `modules`, or -1 where a module is not adapted."""
    shard_axis: int | None
    """Axis of the weight [out, in] that is sharded; None if every rank holds the whole."""
    is_gated: bool
    """Rows are (gate, up) halves on every rank."""
    is_expert: bool
    num_local: int
    """Experts of this rank; 1 elsewhere."""

    @property
    def group(self) -> dist.ProcessGroup:
        return shard_group(is_expert=self.is_expert)

    @property
    def local_modules(self) -> tuple[tuple[str, ...], ...]:
        """Modules of this rank's experts."""
        first = parallel_state.get_expert_model_parallel_rank() * self.num_local if self.is_expert else 0
        return self.modules[first : first + self.num_local]

    def shard(self, whole: Tensor, axis: int) -> Tensor:
        """This rank's part of a tensor along the weight's axis: rows [out, ...] or columns [..., in]."""
        if self.shard_axis != axis:
            return whole
        size, rank = self.group.size(), self.group.rank()
        if axis == 1:
            return whole.chunk(size, dim=-1)[rank]
        halves = whole.chunk(2) if self.is_gated else (whole,)
        return torch.cat([half.chunk(size)[rank] for half in halves])

    def join(self, part: Tensor, axis: int) -> Tensor:
        """The inverse of `shard`: [E, rows, r] or [E, P, r, columns]. A collective."""
        if self.shard_axis != axis:
            return part
        parts = gather_parts(part, self.group)
        return join_parts(parts, 1 if axis == 0 else -1, is_gated=self.is_gated and axis == 0)


class Adapter(torch.nn.Module):
    """The adapters of one linear layer, added to its output by a forward hook."""

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    select: Tensor

    def __init__(
        self,
        layer: torch.nn.Module,
        site: Site,
        lora: LoraConfig,
        switch: Switch,
        factors: Factors,
        *,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.site, self.scale, self._dropout, self._switch = site, lora.alpha / lora.rank, lora.dropout, switch
        self._sequence_parallel = sequence_parallel
        weight = base_weights(layer)[0]
        parts = site.shard(site.part_of_row, 0)
        num_parts = len(site.modules[0])
        select = F.one_hot(parts + 1, num_parts + 1)[:, 1:]
        self.register_buffer("select", select.to(weight), persistent=False)
        with ThreadPoolExecutor(MAX_THREADS) as pool:  # of large models, drawing them takes most of the time
            local = functools.partial(self._local_factors, factors=factors, dtype=weight.dtype)
            pairs = list(pool.map(local, site.local_modules))
        a, b = (torch.stack(tensors).to(weight) for tensors in zip(*pairs, strict=True))
        self.lora_A = torch.nn.Parameter(a)
        self.lora_B = torch.nn.Parameter(b)
        self._mark_for_megatron(weight)
        layer.register_forward_hook(self._add)

    def _local_factors(self, modules: tuple[str, ...], factors: Factors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """This rank's [P, r, in] and [out, r] of one expert, or of the layer."""
        pairs = [factors(module) for module in modules]
        a = torch.stack([a for a, _ in pairs])
        b = a.new_zeros(len(self.site.part_of_row), a.shape[1])
        for part, (_, rows) in enumerate(pairs):
            b[self.site.part_of_row == part] = rows
        return self.site.shard(a, 1).to(dtype), self.site.shard(b, 0).to(dtype)

    def _mark_for_megatron(self, weight: Tensor) -> None:
        """Set the attributes that Megatron's gradient reduction and gradient norm read."""
        site = self.site
        for parameter, axis in ((self.lora_A, 1), (self.lora_B, 0)):
            is_sharded = site.shard_axis == axis
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            if site.is_expert:
                # Not whether it is sharded, but whether this rank's copy counts in the norm of the gradient.
                counts = is_sharded or site.group.rank() == 0
                # Megatron decides by the dense layers' rank which copy counts: with ETP > TP it would count every one.
                parameter.shared = not counts  # type: ignore[attr-defined]
                parameter.sum_over_expert_tensor = not is_sharded  # type: ignore[attr-defined]
            else:
                counts = is_sharded
                parameter.sequence_parallel = not is_sharded and self._sequence_parallel  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(parameter, is_parallel=counts, dim=axis, stride=1)

    def _add(self, layer: Any, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        if not self._switch.enabled:
            return None
        x = args[0]
        if hasattr(layer, "layer_norm_weight"):
            x = rms_norm(x, layer.layer_norm_weight, layer.eps)
        if self._switch.dropping and self._dropout > 0:
            x = self._drop(x)
        delta = self._experts(x, args[1]) if self.site.is_expert else self._dense(x)
        return output[0] + delta, *output[1:]

    def _drop(self, x: Tensor) -> Tensor:
        site = self.site
        if site.shard_axis == 1 or (self._sequence_parallel and not site.is_expert):
            return drop(x, self._dropout, OF_THIS_RANK)
        return drop(x, self._dropout, OF_EXPERT_TENSOR_RANKS if site.is_expert else OF_TENSOR_RANKS)

    def _dense(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.lora_A[0].flatten(0, 1)) * self.scale
        regions = {
            (0, True): mappings.gather_from_sequence_parallel_region,
            (0, False): mappings.copy_to_tensor_model_parallel_region,
            (1, True): mappings.reduce_scatter_to_sequence_parallel_region,
            (1, False): mappings.reduce_from_tensor_model_parallel_region,
        }
        if self.site.shard_axis is not None:
            hidden = regions[self.site.shard_axis, self._sequence_parallel](hidden)
        return F.linear(hidden, self._rows()[0])

    def _experts(self, x: Tensor, rows: ExpertRows | Sequence[int]) -> Tensor:
        hidden = grouped_linear(x, self.lora_A.flatten(1, 2), rows) * self.scale
        return grouped_linear(hidden, self._rows(), rows)

    def _rows(self) -> Tensor:
        """[E, out, P * r]"""
        return self._padded(self.lora_B)

    def _padded(self, b: Tensor) -> Tensor:
        """[..., out, r] -> [..., out, P * r]: each row padded with zeros, to multiply its own A only."""
        return (b[..., None, :] * self.select[:, :, None]).flatten(-2)

    def merged(self, weights: Sequence[Tensor], first: int) -> Tensor:
        """[n, out, in]: this rank's parts of the weights of n local experts from expert `first` on (elsewhere of the
        layer's one weight) with the adapter's changes, added in float32 and rounded once.
        """
        own = slice(first, first + len(weights))
        b, a = self.lora_B[own].detach(), self.lora_A[own].detach()
        changes = self._padded(b).float() @ a.flatten(1, 2).float()
        stacked = torch.stack([weight.detach() for weight in weights])
        return torch.add(stacked, changes, alpha=self.scale, out=stacked)

    def shapes(self) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
        """Yield (module, shape of A, shape of B) in the order of `factors`; no collective."""
        rank, columns = self.lora_A.shape[2:]
        in_size = columns * (self.site.group.size() if self.site.shard_axis == 1 else 1)
        rows = [int((self.site.part_of_row == part).sum()) for part in range(self.lora_A.shape[1])]
        for modules in self.site.modules:
            for module, out_size in zip(modules, rows, strict=True):
                yield module, (rank, in_size), (out_size, rank)

    def factors(self, read: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (module, whole A [r, in], whole B [out, r]) of all experts, on all ranks of the stage. A collective.
        Args: read: returns the value of a parameter, or its gradient in tests.
        """
        a, b = self.site.join(read(self.lora_A), 1), self.site.join(read(self.lora_B), 0)
        if self.site.is_expert and (group := parallel_state.get_expert_model_parallel_group()).size() > 1:
            a, b = torch.cat(gather_parts(a, group)), torch.cat(gather_parts(b, group))
        part_of_row = self.site.part_of_row.to(b.device)
        own_rows = [(part_of_row == part).nonzero().flatten() for part in range(a.shape[1])]  # once: it waits
        for modules, downs, rows in zip(self.site.modules, a, b, strict=True):
            for part, module in enumerate(modules):
                yield module, downs[part], rows[own_rows[part]]


def base_weights(layer: Any) -> list[Any]:
    """The weight of a layer, or those of its local experts."""
    if getattr(layer, "weight", None) is not None:
        return [layer.weight]
    return [getattr(layer, f"weight{index}") for index in range(layer.num_gemms)]


@dataclass(frozen=True, slots=True)
class Lora:
    """All adapters of this rank."""

    config: LoraConfig
    adapters: list[tuple[torch.nn.Module, Adapter]] = field(default_factory=list)
    """Adapters with their layers."""
    switch: Switch = field(default_factory=Switch)

    @property
    def is_sent_alone(self) -> bool:
        """Whether engines receive the adapters instead of merged weights."""
        return isinstance(self.config, SyncedLoraConfig) and self.config.sync == "adapter"

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, adapter in self.adapters for parameter in adapter.parameters()]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable the adapters in the body."""
        self.switch.enabled = False
        try:
            yield
        finally:
            self.switch.enabled = True

    def reduce_gradients(self) -> None:
        """Sum partial gradients over expert-tensor ranks, after Megatron's reductions and before the optimizer step."""
        group = parallel_state.get_expert_tensor_parallel_group()
        if group.size() == 1:
            return
        for parameter in self.parameters:
            if getattr(parameter, "sum_over_expert_tensor", False):
                dist.all_reduce(parameter.main_grad, group=group)  # type: ignore[attr-defined]
