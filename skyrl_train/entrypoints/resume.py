"""Which checkpoint a run goes on from, if any; found before anything is started."""

from __future__ import annotations

import logging
from pathlib import Path

from skyrl_train.config.training import TrainingConfig
from skyrl_train.trainer.run_state import Checkpoint, Checkpoints, layout_of, load_checkpoint

log = logging.getLogger(__name__)


def chosen_checkpoint(trainer: TrainingConfig, num_rows: int) -> Checkpoint | None:
    """As `trainer.resume_mode` says; None where the run starts from the model as it came.

    Raises: ValueError if the checkpoint cannot be gone on with, or if this run would write beside another's.
    """
    checkpoints = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep)
    chosen = None
    if trainer.resume_mode == "latest":
        found = checkpoints.all()
        chosen = found[-1] if found else None
        if chosen is None:
            log.info("%s holds no checkpoint: the run starts from the model", checkpoints.path)
    elif trainer.resume_mode == "from_path":
        assert trainer.resume_path is not None, "checks/training.py asks for it"
        chosen = load_checkpoint(Path(trainer.resume_path).expanduser().resolve())
    if chosen is None or not chosen.folder.is_relative_to(checkpoints.path):
        _require_free(checkpoints, trainer)
    if chosen is not None:
        chosen.state.order.require(num_rows, trainer.seed)
        _require_layout(chosen, trainer)
    return chosen


def goes_on_in_its_folder(trainer: TrainingConfig, chosen: Checkpoint | None) -> bool:
    """Whether the folder of the run is that of the run which is gone on with."""
    return chosen is not None and (trainer.resume_mode == "latest" or chosen.folder.is_relative_to(_run_dir(trainer)))


def _require_free(checkpoints: Checkpoints, trainer: TrainingConfig) -> None:
    """Runs that share a folder would remove each other's checkpoints. One in the run's folder moves away with it."""
    if trainer.ckpt_interval < 0 or checkpoints.path.is_relative_to(_run_dir(trainer)):
        return
    if found := checkpoints.all():
        raise ValueError(
            f"trainer.ckpt_path={checkpoints.path} holds checkpoints, the last of step {found[-1].state.global_step}: "
            "go on from it with trainer.resume_mode=latest, or choose another folder"
        )


def _require_layout(chosen: Checkpoint, trainer: TrainingConfig) -> None:
    written, mine = chosen.state.layout, layout_of(trainer)
    if differing := [name for name, value in mine.items() if written.get(name) != value]:
        raise ValueError(
            f"the checkpoint {chosen.folder} was written by another layout: "
            + ", ".join(f"{name} was {written.get(name)} and is {mine[name]}" for name in differing)
            + ". Give the same, or start a new run from a Hugging Face export (trainer.hf_save_interval)"
        )


def _run_dir(trainer: TrainingConfig) -> Path:
    return Path(trainer.run_dir).expanduser().resolve()
