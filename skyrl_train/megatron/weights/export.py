"""Megatron weights -> whole tensors under Hugging Face names, on the ranks that own them.

Every pipeline stage exports its own layers and nothing travels between stages: the stage's ranks gather each tensor
over tensor (or expert-tensor) parallelism, experts over expert parallelism as well. A task says where the model keeps a
tensor and holds none, so tasks that are kept for the next export cannot be stale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from skyrl_train.hf import adapter as peft
from skyrl_train.megatron.lora.adapters import Adapter, Lora, base_weights
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.weights.gather import gather_parts, join_parts, shard_group
from skyrl_train.weight_sync.bucket import TensorSpec

Read = Callable[[torch.nn.Parameter | Tensor], Tensor]
MERGED_BYTES = 128 << 20
"""The most float32 bytes of weights that are merged with adapters together; a larger weight is merged alone."""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Where this rank keeps a parameter (or buffer that is exported)."""

    owner: torch.nn.Module
    attribute: str
    local_name: str
    name: str
    """Name in the whole model, except that experts count from 0 on every rank."""

    @property
    def tensor(self) -> torch.nn.Parameter | Tensor:
        found = self.owner._parameters.get(self.attribute)  # a module's __getattr__ would take a microsecond
        return getattr(self.owner, self.attribute) if found is None else found

    @property
    def is_expert(self) -> bool:
        return ".mlp.experts.linear_fc" in self.local_name

    @property
    def is_sharded(self) -> bool:
        """Whether tensor parallelism gave this rank a part of it."""
        return bool(getattr(self.tensor, "tensor_model_parallel", False))


@dataclass(frozen=True, slots=True)
class ExportTask:
    """One Megatron tensor of this pipeline stage and how it is exported."""

    live: LiveTensor
    """This rank's part."""
    mcore_names: tuple[str, ...]
    """Global names: one, or one per expert-parallel rank for a tensor of an expert."""
    shard_axis: int | None
    """Axis that tensor parallelism shards; None if every rank holds the whole."""
    is_expert: bool
    is_gated: bool
    """Rows are (gate, up) halves on every rank, so parts must be joined half by half."""


def live_tensors(model: Model) -> list[LiveTensor]:
    """Exported tensors of this rank's model, in layer order; a tied output layer is left to the embedding."""
    tied = getattr(model.bridge.hf_config, "tie_word_embeddings", False)
    found = []
    for chunk, names in zip(model.modules, model.names, strict=True):
        local_names = [name for name, _ in chunk.named_parameters()]
        local_names += [name for name, _ in chunk.named_buffers() if name.endswith("expert_bias")]
        for local_name in local_names:
            # Adapters are exported alone, or `read` folds them into the weights.
            if not (tied and local_name == "output_layer.weight") and ".lora." not in local_name:
                path, _, attribute = local_name.rpartition(".")
                found.append(LiveTensor(chunk.get_submodule(path), attribute, local_name, names[local_name]))
    return found


def expert_names(model: Model, live: LiveTensor) -> tuple[str, ...]:
    """Global names of the corresponding tensor on each expert-parallel rank; one name if it is not an expert's."""
    if not live.is_expert:
        return (live.name,)
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    stem, index = live.name.rsplit(".weight", 1)
    per_rank = model.bridge.config.num_moe_experts // ep_size
    return tuple(f"{stem}.weight{int(index) + rank * per_rank}" for rank in range(ep_size))


def export_tasks(model: Model) -> list[ExportTask]:
    """Tasks of this stage in layer order, the same on all ranks of the stage. No collective, no copy. Each Hugging Face
    name occurs once over all stages.
    """
    tasks = []
    for live in live_tensors(model):
        mcore_names = expert_names(model, live)
        hf_names = model.bridge._weight_name_mapping_mcore_to_hf(mcore_names[0])
        is_split = live.is_sharded and shard_group(is_expert=live.is_expert).size() > 1
        tasks.append(
            ExportTask(
                live=live,
                mcore_names=mcore_names,
                shard_axis=live.tensor.partition_dim if is_split else None,  # type: ignore[attr-defined]
                is_expert=live.is_expert,
                is_gated="linear_fc1" in live.local_name and len(hf_names) == 2,
            )
        )
    return tasks


def whole_shape(task: ExportTask) -> list[int]:
    """Shape of the tensor before it was sharded."""
    shape = list(task.live.tensor.shape)
    if task.shard_axis is not None:
        shape[task.shard_axis] *= shard_group(is_expert=task.is_expert).size()
    return shape


def export_specs(model: Model, dtype: torch.dtype) -> list[TensorSpec]:
    """Names, dtypes and shapes of what `export` yields on this stage, without materialising a weight."""
    specs = []
    for task in export_tasks(model):
        shape = whole_shape(task)
        for mcore_name in task.mcore_names:
            names, tensors = model.bridge._weight_to_hf_format(mcore_name, torch.empty(shape, device="meta"))
            for name, tensor in zip(names, tensors, strict=True):
                specs.append(TensorSpec(name, dtype_of_name(name, dtype), tuple(tensor.shape)))
    return specs


def export(
    model: Model,
    dtype: torch.dtype,
    read: Read = lambda tensor: tensor.detach(),
    tasks: Sequence[ExportTask] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of this stage's weights, on every rank of the stage.

    A collective over the stage's tensor and expert groups: all their ranks must drain it. Tensors may be views of
    live parameters: copy them before the next optimizer step.
    Args: read: returns what is exported of a parameter (its gradient in tests); tasks: those of the model, for exports
        that are repeated.
    """
    ep_group = parallel_state.get_expert_model_parallel_group()
    for task in tasks or export_tasks(model):
        whole = read(task.live.tensor)
        if task.shard_axis is not None:
            parts = gather_parts(whole, shard_group(is_expert=task.is_expert))
            whole = join_parts(parts, task.shard_axis, is_gated=task.is_gated)
        copies = gather_parts(whole, ep_group) if task.is_expert else [whole]
        for mcore_name, copy in zip(task.mcore_names, copies, strict=True):
            for name, tensor in zip(*model.bridge._weight_to_hf_format(mcore_name, copy), strict=True):
                wanted = dtype_of_name(name, dtype)
                yield name, tensor if tensor.dtype == wanted else tensor.to(wanted)


def is_stage_owner() -> bool:
    """True on the one rank of each pipeline stage that sends or saves what the stage exports."""
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


@functools.cache
def dtype_of_name(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of an exported tensor: a router's bias is float32 in checkpoints and engines, whatever the model's."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def merged(lora: Lora | None) -> Read:
    """A `read` for one export that returns W + alpha / r * B A, added in float32 and rounded once; W without adapters.
    It needs only the adapters of this rank's part of a weight: no collective.
    """
    places: dict[int, tuple[Adapter, list[Tensor], int]] = {}
    for layer, adapter in lora.adapters if lora else ():
        weights = base_weights(layer)
        places |= {id(weight): (adapter, weights, index) for index, weight in enumerate(weights)}
    last: dict[int, Tensor] = {}
    """Merged weights of the block that was read last. Merging experts one by one takes seconds for a large model."""

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) not in places:
            return tensor.detach()
        if id(tensor) not in last:
            last.clear()
            adapter, weights, index = places[id(tensor)]
            num = max(1, MERGED_BYTES // (4 * tensor.numel()))
            first = index // num * num
            some = weights[first:][:num]
            last.update(zip(map(id, some), adapter.merged(some, first), strict=True))
        return last[id(tensor)]

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
