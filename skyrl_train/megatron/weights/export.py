"""Megatron weights -> whole tensors under Hugging Face names, on the ranks that own them.

Every pipeline stage exports its own layers and nothing travels between stages: the stage's ranks gather each tensor
over tensor (or expert-tensor) parallelism, experts over expert parallelism as well. `export_tasks` is derived anew
from the parameters each time; it holds no result of a collective, so nothing in it can be stale.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from skyrl_train.file_sum import FileSum, sum_of
from skyrl_train.hf.checkpoint import INDEX
from skyrl_train.megatron.layers.tp_parts import gather_parts, join_parts
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.weights.gather_plain import gather_json
from skyrl_train.weight_sync.bucket import TensorSpec

Read = Callable[[torch.nn.Parameter | Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExportTask:
    """One Megatron tensor of this pipeline stage and what becomes of it."""

    tensor: torch.nn.Parameter | Tensor
    """This rank's part; a live parameter."""
    mcore_names: tuple[str, ...]
    """Global names: one, or one per expert-parallel rank for a tensor of an expert."""
    shard_axis: int | None
    """Axis that tensor parallelism cuts; None if every rank holds the whole."""
    is_expert: bool
    is_gated: bool
    """Rows are (gate, up) halves on every rank, so parts must be joined half by half."""


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A parameter (or buffer that is exported) of this rank."""

    tensor: torch.nn.Parameter | Tensor
    local_name: str
    name: str
    """In the whole model, except that experts count from 0 on every rank."""

    @property
    def is_expert(self) -> bool:
        return ".mlp.experts.linear_fc" in self.local_name

    @property
    def is_cut(self) -> bool:
        """Tensor parallelism gave this rank a part of it."""
        return bool(getattr(self.tensor, "tensor_model_parallel", False))


def live_tensors(model: Model) -> Iterator[LiveTensor]:
    """What is exported of this rank's model, in layer order; a tied output layer is left to the embedding."""
    tied = getattr(model.bridge.hf_config, "tie_word_embeddings", False)
    for module, names in zip(model.modules, model.names, strict=True):
        named: dict[str, torch.nn.Parameter | Tensor] = dict(module.named_parameters())
        named |= {name: buffer for name, buffer in module.named_buffers() if name.endswith("expert_bias")}
        for local_name, tensor in named.items():
            # Adapters are sent by lora_export.py, or `read` folds them into the weights.
            if not (tied and local_name == "output_layer.weight") and ".lora." not in local_name:
                yield LiveTensor(tensor, local_name, names[local_name])


def expert_names(model: Model, one: LiveTensor) -> tuple[str, ...]:
    """Global names of the tensor that each expert-parallel rank has in this one's place; one name if it is no
    expert's."""
    if not one.is_expert:
        return (one.name,)
    ep_size = parallel_state.get_expert_model_parallel_world_size()
    stem, index = one.name.rsplit(".weight", 1)
    per_rank = model.bridge.config.num_moe_experts // ep_size
    return tuple(f"{stem}.weight{int(index) + rank * per_rank}" for rank in range(ep_size))


def export_tasks(model: Model) -> list[ExportTask]:
    """Tasks of this stage in layer order, the same on all ranks of the stage. No collective, no copy.

    Each Hugging Face name comes once over all stages.
    """
    tasks = []
    for one in live_tensors(model):
        mcore_names = expert_names(model, one)
        hf_names = model.bridge._weight_name_mapping_mcore_to_hf(mcore_names[0])
        tasks.append(
            ExportTask(
                tensor=one.tensor,
                mcore_names=mcore_names,
                shard_axis=one.tensor.partition_dim if one.is_cut else None,  # type: ignore[union-attr]
                is_expert=one.is_expert,
                is_gated="linear_fc1" in one.local_name and len(hf_names) == 2,
            )
        )
    return tasks


def whole_shape(task: ExportTask) -> list[int]:
    """Of the tensor that its shards make together."""
    shape = list(task.tensor.shape)
    if task.shard_axis is not None:
        shape[task.shard_axis] *= _shard_group(task).size()
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
    model: Model, dtype: torch.dtype, read: Read = lambda tensor: tensor.detach()
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of this stage's weights, on every rank of the stage.

    A collective over the stage's tensor and expert groups: all their ranks must drain it. Tensors may be views of
    live parameters: copy them before the next optimizer step. `read` picks what is exported of a parameter (its
    gradient in tests).
    """
    for task in export_tasks(model):
        part = read(task.tensor)
        whole = part
        if task.shard_axis is not None:
            whole = join_parts(gather_parts(part, _shard_group(task)), task.shard_axis, is_gated=task.is_gated)
        ep_group = parallel_state.get_expert_model_parallel_group()
        copies = gather_parts(whole, ep_group) if task.is_expert else [whole]
        for mcore_name, copy in zip(task.mcore_names, copies, strict=True):
            for name, tensor in zip(*model.bridge._weight_to_hf_format(mcore_name, copy), strict=True):
                yield name, tensor.to(dtype_of_name(name, dtype))


def is_stage_owner() -> bool:
    """True on the one rank of each pipeline stage that sends or saves what the stage exports."""
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def save_hf(model: Model, source: str, folder: str, read: Read = lambda tensor: tensor.detach()) -> dict[str, FileSum]:
    """Write a Hugging Face checkpoint: one safetensors file per pipeline stage, the index, configuration and tokenizer.

    A collective over all ranks. The weights are read again and compared with the tensors, bit by bit.

    Returns: on every rank, size and digest of each file of weights.
    Raises: ValueError on every rank if one cannot write, most often before anything is exported; no rank is left
        waiting.
    """
    target = Path(folder)
    owner = is_stage_owner()
    write_together(target, lambda: check_writable(target) if owner else None)
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    file = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
    tensors = {}
    for name, tensor in export(model, model.dtype, read):
        if owner:
            tensors[name] = tensor.contiguous().cpu()
    sums: dict[str, FileSum] = {}

    def write_weights() -> None:
        if owner:
            save_file(tensors, target / file, metadata={"format": "pt"})
            sums[file] = sum_of(target / file, durable=True)
            require_tensors(target / file, tensors)

    write_together(target, write_weights)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    plain = {name: asdict(one) for name, one in sums.items()}
    written = [
        ({name: FileSum(**one) for name, one in of_rank.items()}, sizes)
        for of_rank, sizes in gather_json((plain, sizes if owner else {}))
    ]

    def write_the_rest() -> None:
        if dist.get_rank() != 0:
            return
        weight_map = {name: file for of_rank, sizes in written for file in of_rank for name in sizes}
        total = sum(sum(sizes.values()) for _, sizes in written)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=1))
        # Not the bridge's copy, which holds the fields that mbridge looks for.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        config.dtype = model.dtype
        if hasattr(config, "quantization_config"):  # of DeepSeek's FP8 weights, which are dequantised
            del config.quantization_config
        config.save_pretrained(target)
        _copy_tokenizer(model.bridge._get_actual_hf_path(source), target)

    write_together(target, write_the_rest)
    return {file: one for of_rank, _ in written for file, one in of_rank.items()}


def require_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare a safetensors file with what was written. Raises: OSError if a byte differs."""
    with safe_open(file, "pt") as stored:
        names = set(stored.keys())
        for name, tensor in tensors.items():
            if name not in names or not _same_bytes(stored.get_tensor(name), tensor):
                raise OSError(f"{file} was written and does not hold the {name} that was written")


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit agree, also of NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_together(folder: str | Path, write: Callable[[], None]) -> None:
    """Have every rank write what is its own, and wait for all. Raises: ValueError on all of them if one cannot."""
    problem = ""
    try:
        write()
    except (OSError, SafetensorError) as error:
        problem = f"the checkpoint cannot be written into {folder}: {error}"
    if told := next(filter(None, gather_json(problem)), ""):
        raise ValueError(told)


def _copy_tokenizer(source: str, target: Path) -> None:
    for file in Path(source).iterdir():
        if file.suffix in {".json", ".jinja", ".model", ".txt"} and not (target / file.name).exists():
            shutil.copy(file, target / file.name)


def _shard_group(task: ExportTask) -> dist.ProcessGroup:
    if task.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def dtype_of_name(name: str, dtype: torch.dtype) -> torch.dtype:
    """The bias of a router is float32 in checkpoints and engines, whatever the model's dtype."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype
