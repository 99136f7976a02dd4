"""What must hold for the profiler's files; as rl.py."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.policy import MegatronConfig


def profiled(megatron: MegatronConfig) -> list[str]:
    """Keys of torch_profiler_config that ask for files."""
    profiler = megatron.torch_profiler_config
    return [key for key in ("enable", "record_memory") if getattr(profiler, key)]


def profiler_problems(megatron: MegatronConfig, path: str, world_size: int) -> Iterator[str]:
    """Files that are asked for and would never be written; `path` is the key of `megatron`."""
    profiler = megatron.torch_profiler_config
    if profiled(megatron) and not any(rank < world_size for rank in profiler.ranks):
        yield (
            f"{path}.torch_profiler_config.ranks is {list(profiler.ranks)}: nothing would be traced, name ranks from 0 "
            f"to {world_size - 1}"
        )
    if profiler.enable and not profiler.steps:
        yield f"{path}.torch_profiler_config.steps is empty: nothing would be traced, name steps, counted from 1"


def restart_problems(megatron: MegatronConfig, path: str) -> Iterator[str]:
    """What does not go with trainers that end after each turn (trainer.placement.release=exit)."""
    for key in profiled(megatron):
        yield (
            f"{path}.torch_profiler_config.{key} is true and trainer.placement.release exit: each step has new "
            "processes, which count steps from 1, profile with release=offload"
        )
