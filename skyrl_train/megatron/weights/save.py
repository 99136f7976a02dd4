"""Exports in files: a Hugging Face checkpoint and its adapters, in a folder that is published when it is complete."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import CHAT_TEMPLATE_DIR
from transformers.utils import CONFIG_NAME as CONFIG

from skyrl_train.file_sum import FileSum, size_problems, sum_of
from skyrl_train.hf import adapter
from skyrl_train.hf.checkpoint import INDEX, SUMS
from skyrl_train.hf.hub import local_folder, name_and_revision
from skyrl_train.hf.tensor_file import save_tensors
from skyrl_train.megatron.lora.adapters import Lora
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.weights.export import Read, export, export_adapter, export_specs, is_stage_owner, merged
from skyrl_train.megatron.weights.gather import gather_json
from skyrl_train.weight_sync.bucket import plan_buckets

FILE_BYTES = 5 * 10**9
"""The most bytes of tensors in one file; a larger tensor has its own."""


@contextlib.contextmanager
def export_folder(folder: str) -> Iterator[tuple[str, dict[str, FileSum]]]:
    """Yield an empty folder for the files of an export, and a dictionary for the sums of files of other ranks.

    The folder becomes `folder` at the end, with a list of all digests. If that fails, or the body raises, rank 0
    removes it, and the previous contents of `folder` stay. A collective over all ranks, which must all see the folder.
    Raises: ValueError on every rank if one cannot write.
    """
    target, is_first = Path(folder), dist.get_rank() == 0
    # Inside the folder if it exists: it may be a mount, or its parent may not be writable.
    unfinished = target / ".unfinished" if target.exists() else target.with_name(f".{target.name}.unfinished")
    sums: dict[str, FileSum] = {}
    write_together(unfinished, lambda: _remove(unfinished) if is_first else None)
    try:
        yield str(unfinished), sums
        write_together(folder, lambda: _publish(unfinished, target, sums) if is_first else None)
    except ValueError:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _publish(unfinished: Path, target: Path, sums: Mapping[str, FileSum]) -> None:
    """Make `unfinished` the folder `target`, with the digests of all files.

    In a folder that exists, files are replaced one by one, those that only an earlier export has are removed, and
    the index is missing until all are written, so that nobody loads old and new weights together.
    Args: sums: known digests; the other files are read.
    Raises: OSError, also if a file is missing: another node wrote it where this one does not see it; or if there are
        weights that an export did not write, which readers would prefer or mix in.
    """
    listed = (target / SUMS).read_text() if (target / SUMS).exists() else ""
    own = {line.split("  ", 1)[-1] for line in listed.splitlines()}
    if foreign := sorted(file.name for file in target.glob("*.safetensors") if file.name not in own):
        raise OSError(f"the folder has weights of another origin ({', '.join(foreign[:3])}). Choose an empty folder")
    if problems := size_problems(unfinished, sums):
        raise OSError(f"{'; '.join(problems)}. The folder of an export must be one folder for all nodes")
    files = sorted(str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file())
    digests = {name: (sums.get(name) or sum_of(unfinished / name, durable=True)).sha256 for name in files}
    text = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    (unfinished / SUMS).write_text(text)
    if not unfinished.is_relative_to(target):
        unfinished.replace(target)
        return
    (target / INDEX).unlink(missing_ok=True)
    (target / SUMS).write_text(f"{listed}\n{text}")  # if this is killed, the next export knows both
    for name in sorted((*files, SUMS), key=lambda name: (name == INDEX, name == SUMS)):
        if name == SUMS:
            _remove_files(target, own.difference(files))
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(target / name)
    _remove(unfinished)


def _remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove those files that are in the folder, and folders in it that become empty."""
    for file in (folder / name for name in names):
        if file.is_file() and file.resolve().is_relative_to(folder.resolve()):
            file.unlink()
            if file.parent != folder and not any(file.parent.iterdir()):
                file.parent.rmdir()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def save_model(model: Model, source: str, folder: str) -> None:
    """Write the model as a Hugging Face checkpoint; with adapters folded in, and these in `folder/adapter`.

    A collective over all ranks. The folder gets its name when it is complete and verified.
    Args: source: folder or hub name of the model that was loaded. Raises: ValueError if it cannot be written.
    """
    lora = model.lora
    with export_folder(folder) as (unfinished, sums):
        sums |= save_hf(model, source, unfinished, merged(lora))
        if lora is not None:
            save_adapter(lora, f"{unfinished}/adapter", local_folder(source), name_and_revision(source)[0])


def save_hf(model: Model, source: str, folder: str, read: Read = lambda tensor: tensor.detach()) -> dict[str, FileSum]:
    """Write a Hugging Face checkpoint: safetensors files of at most 5 GB, the index, configuration and tokenizer.

    A collective over all ranks. Those of a stage that see its owner's folder write its files side by side. The weights
    are read back and compared with the tensors, bit by bit.

    Returns: on every rank, size and digest of each file of weights.
    Raises: ValueError on every rank if one cannot write, usually before anything is exported; no rank is left waiting.
    """
    target, owner = Path(folder), is_stage_owner()
    marker = target / f".stage-{parallel_state.get_pipeline_model_parallel_rank()}"
    write_together(target, lambda: _make_writable(target, marker) if owner else None)
    # os.path: a folder that this rank may not look into is no error.
    files, own = _files_of_stage(model, can_write=os.path.exists(marker))
    write_together(target, lambda: _require_writable(target) if own else None)
    tensors: dict[str, dict[str, Tensor]] = {file: {} for file in own}
    for file, (name, tensor) in zip(files, export(model, model.dtype, read), strict=True):
        if file in own:
            tensors[file][name] = tensor.contiguous().cpu()
    sums: dict[str, FileSum] = {}

    def write_weights() -> None:
        if owner:
            marker.unlink()
        for file, held in tensors.items():
            save_tensors(target / file, held, {"format": "pt"})
            sums[file] = sum_of(target / file, durable=True)
            require_tensors(target / file, held)

    write_together(target, write_weights)
    mine = [
        (file, asdict(sums[file]), {name: tensor.nbytes for name, tensor in held.items()})
        for file, held in tensors.items()
    ]
    written = sorted(part for parts in gather_json(mine) for part in parts)

    def write_the_rest() -> None:
        if dist.get_rank() != 0:
            return
        weight_map = {name: file for file, _, sizes in written for name in sizes}
        total = sum(sum(sizes.values()) for _, _, sizes in written)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=1))
        read_from = local_folder(source)
        write_config(Path(read_from), target, model.dtype)
        copy_others(Path(read_from), target)

    write_together(target, write_the_rest)
    return {file: FileSum(**file_sum) for file, file_sum, _ in written}


def _files_of_stage(model: Model, *, can_write: bool) -> tuple[list[str], list[str]]:
    """The file of each tensor that `export` yields on this stage, and the files that this rank writes, which are known
    before an export. A collective over all ranks.
    """
    plan = plan_buckets(export_specs(model, model.dtype), FILE_BYTES)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    places = gather_json([stage, len(plan), is_stage_owner(), can_write])
    num_files = {each: number for each, number, *_ in places}
    first, total = sum(num_files[each] for each in range(stage)), sum(num_files.values())
    names = [f"model-{first + number:05d}-of-{total:05d}.safetensors" for number in range(1, len(plan) + 1)]
    ranks = (rank for rank, (each, _, _, writes) in enumerate(places) if each == stage and writes)
    writers = sorted(ranks, key=lambda rank: not places[rank][2])  # the owner first
    own = [name for name, rank in zip(names, itertools.cycle(writers), strict=False) if rank == dist.get_rank()]
    return [name for name, specs in zip(names, plan, strict=True) for _ in specs], own


def write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write a model's config.json for unquantised weights of this dtype; every other field stays as it is.

    Not with transformers, which renames fields: version 5 writes `rope_theta` into `rope_parameters`, where version 4
    does not look, so that it computes with its default. Raises: OSError.
    """
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # of DeepSeek's FP8 weights, which are dequantised
    spellings = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(spellings, str(dtype).removeprefix("torch."))
    (target / CONFIG).write_text(f"{json.dumps(config, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def copy_others(source: Path, target: Path) -> None:
    """Copy a model's tokenizer, code and texts, without replacing a file.

    Not an index of other weights, nor the adapter_config.json that PEFT leaves beside merged weights: transformers
    would load an adapter, whose weights are not copied.
    """
    for path in (*source.iterdir(), *source.glob(f"{CHAT_TEMPLATE_DIR}/*.jinja")):
        copied = target / path.relative_to(source)
        is_wanted = path.suffix in {".json", ".jinja", ".model", ".txt", ".py"} and path.name != adapter.CONFIG_FILE
        if is_wanted and not path.name.endswith(".index.json") and not copied.exists():
            copied.parent.mkdir(exist_ok=True)
            shutil.copy(path, copied)


def save_adapter(lora: Lora, folder: str, base_folder: str, base_model: str) -> None:
    """Write one adapter of all stages in PEFT's format into `folder`. A collective over all ranks.

    The first stage's owner reads the other stages' adapters from files that their owners leave in the folder.
    Args: base_folder: the base model; base_model: its name in the configuration.
    Raises: ValueError on every rank if it cannot be written; no rank is left waiting.
    """
    target, owner, stage = Path(folder), is_stage_owner(), parallel_state.get_pipeline_model_parallel_rank()
    writes = owner and stage == 0
    parts = [target / f".stage-{n}.safetensors" for n in range(parallel_state.get_pipeline_model_parallel_world_size())]
    write_together(target, lambda: _require_writable(target) if writes else None)
    tensors = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in export_adapter(lora)
        if owner
    }

    def write_part() -> None:
        if owner and not writes:
            safetensors.torch.save_file(tensors, parts[stage])

    def write() -> None:
        if writes:
            for part in parts[1:]:
                tensors.update(safetensors.torch.load_file(part))
                part.unlink()
            adapter.save(folder, tensors, base_folder, base_model, lora.config)
            require_tensors(target / adapter.TENSORS_FILE, tensors)

    write_together(target, write_part)
    write_together(target, write)


def require_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare a safetensors file with the tensors that were written, bit by bit, NaN too. Raises: OSError."""
    with safe_open(file, "pt") as stored:
        names = set(stored.keys())
        for name, tensor in tensors.items():
            if name not in names or not _same_bytes(stored.get_tensor(name), tensor):
                raise OSError(f"{file} was written and does not hold the {name} that was written")


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    same_form = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same_form and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _make_writable(folder: Path, marker: Path) -> None:
    _require_writable(folder)
    marker.touch()


def _require_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_together(folder: str | Path, write: Callable[[], None]) -> None:
    """Have every rank write its own files, and wait for all. Raises: ValueError on all of them if one cannot."""
    problem = ""
    try:
        write()
    except (OSError, SafetensorError) as error:
        problem = f"the checkpoint cannot be written into {folder}: {error}"
    if first := next(filter(None, gather_json(problem)), ""):
        raise ValueError(first)
