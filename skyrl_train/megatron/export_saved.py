"""Hugging Face export of a checkpoint: policy ranks without optimizer, as processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.megatron.model.model import build_model, dtype_of
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.residency.state import load_weights, state_file
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.weights.save import save_model
from skyrl_train.ranks import Rendezvous

TIMEOUT_S = 6 * 3600.0
"""Timeout in seconds of the whole export; a rank that fails ends the others at once."""


@dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """The files of a policy's ranks, and the settings from which they built their model."""

    folder: str
    num_ranks: int
    num_steps: int
    """Number of optimizer steps that the weights have had."""
    model_path: str
    megatron: MegatronConfig
    lora: LoraConfig
    bf16: bool
    seed: int


def export_saved(saved: SavedPolicy, target: str) -> None:
    """Write the model as a Hugging Face checkpoint into the folder `target`. Needs memory for the model once.

    Raises: RuntimeError with the traceback of the first rank that failed.
    """
    run_on_ranks(_export, (saved, target), saved.num_ranks, timeout_s=TIMEOUT_S)


def _export(rendezvous: Rendezvous, arguments: tuple[SavedPolicy, str]) -> None:
    saved, target = arguments
    ranks = join(rendezvous, saved.megatron, saved.seed)
    model = build_model(
        saved.model_path, saved.megatron, dtype_of(saved.bf16), trainable=False, lora=saved.lora, seed=saved.seed
    )
    load_weights(state_file(saved.folder, rendezvous.rank), model.modules, ranks, saved.num_steps)
    save_model(model, saved.model_path, target)
