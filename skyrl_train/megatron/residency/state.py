"""State of a policy rank in one file, from which another process of the same layout resumes bit for bit.

Trained weights, optimizer state, random states and the policy version. Frozen weights (all but adapters under LoRA)
come from the checkpoint that the other process loads; only their names and shapes are kept.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from skyrl_train.device import device_type
from skyrl_train.file_sum import FileSum, SummingWriter
from skyrl_train.megatron.residency.memory import torch_optimizers
from skyrl_train.ranks import ParallelRanks

FORMAT = 2


def state_file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"rank_{rank}.pt")


def save_state(file: Path, modules: list[nn.Module], optimizer: Any, ranks: ParallelRanks, policy_version: int) -> None:
    """Write the file, which appears when it is complete.
    Raises: OSError, for example if the disk is full.
    """
    state = _state(modules, optimizer, ranks, policy_version)
    with _unfinished(file) as stream:
        torch.save(state, stream)


def save_durable_state(
    file: Path, modules: list[nn.Module], optimizer: Any, ranks: ParallelRanks, policy_version: int
) -> FileSum:
    """Like `save_state`, but the file survives a loss of power.
    Returns: size and digest of the bytes as they were written; what the disk returns later is compared with them.
    """
    state = _state(modules, optimizer, ranks, policy_version)
    with _unfinished(file) as stream:
        writer = SummingWriter(stream)
        try:
            torch.save(state, cast(IO[bytes], writer))
        finally:
            file_sum = writer.close()
        os.fsync(stream.fileno())
    return file_sum


def _state(modules: list[nn.Module], optimizer: Any, ranks: ParallelRanks, policy_version: int) -> dict[str, Any]:
    """torch.save writes views of one storage once, so Megatron's flat buffers need no copy."""
    return {
        "format": FORMAT,
        "ranks": asdict(ranks),
        "policy_version": policy_version,
        "shapes": [_shapes(module) for module in modules],
        "weights": [_named(module) for module in modules],
        "optimizer": [_optimizer_state(part) for part in torch_optimizers(optimizer)],
        "random": _random_states(),
    }


@contextlib.contextmanager
def _unfinished(file: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a temporary file, which is renamed to `file` if nothing was raised.

    An older file is deleted first, to need memory or disk space only once. Nothing resumes from it: a service writes
    into the folder that does not hold the last version's state.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    unfinished = file.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as stream:
            yield stream
    except RuntimeError as error:  # torch's writer raises it in place of the stream's OSError
        if isinstance(cause := error.__context__, OSError):
            raise OSError(cause.errno, cause.strerror, str(unfinished)) from error
        raise
    unfinished.replace(file)


@torch.no_grad()
def load_state(file: Path, modules: list[nn.Module], optimizer: Any, ranks: ParallelRanks, policy_version: int) -> None:
    """Copy the file's values in place.
    Raises: ValueError if it is missing, of another version, or was written by another rank, layout or model.
    """
    state = _read(file, ranks, policy_version)
    for module, shapes, saved in zip(modules, state["shapes"], state["weights"], strict=True):
        # The optimizer's state is by position, so the order matters: Transformer Engine's experts differ in it.
        if list(_shapes(module).items()) != list(shapes.items()):
            raise ValueError(f"{file} has the weights of another model or layout, or of other layers")
        if differing := sorted(_named(module).keys() ^ saved.keys()):
            raise ValueError(f"{file} is from a run that trained other weights: only one run trained {differing[0]}")
        _copy_weights(module, saved)
    for part, saved in zip(torch_optimizers(optimizer), state["optimizer"], strict=True):
        _load_optimizer(part, saved)
    _set_random_states(state["random"])


@torch.no_grad()
def load_weights(file: Path, modules: list[nn.Module], ranks: ParallelRanks, policy_version: int) -> None:
    """Copy only the file's weights, into a model without an optimizer and with either kind of layers.
    Raises: like `load_state`.
    """
    state = _read(file, ranks, policy_version)
    for module, shapes, saved in zip(modules, state["shapes"], state["weights"], strict=True):
        if _shapes(module) != shapes:
            raise ValueError(f"{file} has the weights of another model or layout")
        _copy_weights(module, saved)


def _copy_weights(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = dict((*module.named_parameters(), *module.named_buffers()))
    for name, tensor in saved.items():
        own[name].copy_(tensor)


def _read(file: Path, ranks: ParallelRanks, policy_version: int) -> dict[str, Any]:
    """The file's state, mapped from disk. Raises: ValueError."""
    if not file.exists():
        raise ValueError(f"the state {file} does not exist: it was saved by fewer ranks, or on another node")
    state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if (state["format"], state["ranks"]) != (FORMAT, asdict(ranks)):
        raise ValueError(
            f"{file} has format {state['format']} and rank {state['ranks']}; this process has format {FORMAT} and "
            f"rank {asdict(ranks)}"
        )
    if state["policy_version"] != policy_version:
        raise ValueError(
            f"{file} has policy version {state['policy_version']}, expected {policy_version}: another run writes "
            "into the same folder. Give each run its own trainer.run_name or trainer.placement.state_path"
        )
    return state


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())}


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that training may change."""
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    return {name: tensor.detach() for name, tensor in (*trained, *module.named_buffers())}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters (float32 copies of bfloat16 weights), their state and each group's number of steps."""
    return {
        "groups": [{k: v for k, v in group.items() if k == "step"} for group in optimizer.param_groups],
        "parameters": [[p.detach() for p in group["params"]] for group in optimizer.param_groups],
        "state": [[dict(optimizer.state.get(p, {})) for p in group["params"]] for group in optimizer.param_groups],
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    parts = zip(optimizer.param_groups, saved["groups"], saved["parameters"], saved["state"], strict=True)
    for group, values, parameters, states in parts:
        group.update(values)
        for parameter, value, state in zip(group["params"], parameters, states, strict=True):
            parameter.copy_(value)
            mine = optimizer.state[parameter] if state else {}
            for name, saved_value in state.items():
                if isinstance(saved_value, Tensor) and name in mine:
                    mine[name].copy_(saved_value)  # in place: it may be a view of a merged storage (storages.py)
                elif isinstance(saved_value, Tensor):
                    mine[name] = saved_value.to(parameter.device, copy=True)
                else:
                    mine[name] = saved_value


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if device_type() == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    # A run without dropout of adapters saved no states for it, and keeps those with which this one began.
    tracker.set_states({**tracker.get_states(), **states["megatron"]})
    if device_type() == "cuda":
        torch.cuda.set_rng_state(states["cuda"])
