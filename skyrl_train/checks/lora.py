"""What must hold between the keys of LoRA and the others; as rl.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.config.policy import LoraConfig
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.hf.adapter import slot_problem


def lora_problems(lora: LoraConfig) -> Iterator[str]:
    """An adapter to start from that is not there, or that nothing would read."""
    key = "trainer.policy.model.lora"
    if lora.rank > 0 and not lora.target_modules:
        yield f"{key}.target_modules is empty: name modules, or all-linear"
    if lora.path is None:
        return
    if lora.rank == 0:
        yield f"{key}.path is {lora.path} and {key}.rank 0: set rank to the adapter's, or path to null"
    elif not Path(lora.path).expanduser().is_dir():
        yield f"{key}.path is {lora.path}: there is no such folder in {Path.cwd()}, give one with an adapter"


def lora_sync_problems(config: Config) -> Iterator[str]:
    """Engines that cannot take an adapter."""
    lora = config.trainer.policy.model.lora
    if lora.rank == 0 or lora.sync != "adapter":
        return
    if problem := slot_problem(lora.rank):
        yield problem
    if not config.generator.run_engines_locally:
        yield (
            "trainer.policy.model.lora.sync is adapter and generator.run_engines_locally false: servers that run "
            "already get merged weights, set lora.sync=merged"
        )


def lora_reference_problems(trainer: TrainerConfig) -> Iterator[str]:
    """A reference other than the policy's own model."""
    base, ref = trainer.policy.model, trainer.ref.model
    if base.lora.rank > 0 and trainer.algorithm.needs_reference and ref.path != base.path:
        yield (
            f"trainer.ref.model.path is {ref.path}: with trainer.policy.model.lora.rank above 0 the reference is the "
            "policy's own model without its adapters, leave the key as it is"
        )
