"""The checkpoint from which a run resumes, if any; found and verified before anything is started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TextIO

from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import OrderState
from skyrl_train.tracking.run_dir import lock_folder, read_record
from skyrl_train.trainer.run_state import Checkpoint, Checkpoints, load_checkpoint, settings_of

log = logging.getLogger(__name__)


def lock_checkpoints(trainer: TrainingConfig) -> TextIO | None:
    """Keep other runs from trainer.ckpt_path until the file is closed: they would remove each other's checkpoints.

    None where nobody else can write: in the run's own folder, which has a lock, or where this run writes nothing.
    Raises: ValueError if another run has it, or if it cannot be made.
    """
    path = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep).path
    if trainer.ckpt_interval < 0 or path.is_relative_to(_run_dir(trainer)):
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
        return lock_folder(path, "trainer.ckpt_path", "choose another folder")
    except OSError as error:
        raise ValueError(f"trainer.ckpt_path={path} cannot be made: {error}") from error


def chosen_checkpoint(trainer: TrainingConfig, num_rows: int) -> Checkpoint | None:
    """As `trainer.resume_mode` says; None where the run starts from the model as it came.

    Raises: ValueError if the checkpoint cannot be gone on with, or if this run would write beside another's.
    """
    checkpoints = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep)
    chosen = None
    if trainer.resume_mode == "latest":
        chosen = checkpoints.newest_intact()
        if chosen is None:
            log.info("%s holds no checkpoint: the run starts from the model", checkpoints.path)
    elif trainer.resume_mode == "from_path":
        assert trainer.resume_path is not None, "checks/training.py asks for it"
        chosen = load_checkpoint(Path(trainer.resume_path).expanduser().resolve())
        chosen.verify()
    if chosen is None or not chosen.folder.is_relative_to(checkpoints.path):
        _require_free(checkpoints, trainer)
    if chosen is not None:
        _require_settings(chosen, trainer)
        if not isinstance(trainer, TrainerConfig) or trainer.source == "on_policy":
            OrderState.read(chosen.state.source).require(num_rows, trainer.seed)
    return chosen


def goes_on_in_its_folder(trainer: TrainingConfig, chosen: Checkpoint | None) -> bool:
    """Whether what lies in the folder of the run is the run which is gone on with."""
    if chosen is None:
        return False
    path = _run_dir(trainer)
    return chosen.folder.is_relative_to(path) or read_record(path).get("run_id") == chosen.state.run_id


def _require_free(checkpoints: Checkpoints, trainer: TrainingConfig) -> None:
    """Those in the run's own folder move away with it."""
    if trainer.ckpt_interval < 0 or checkpoints.path.is_relative_to(_run_dir(trainer)):
        return
    if names := checkpoints.names():
        raise ValueError(
            f"trainer.ckpt_path is {checkpoints.path}: it holds checkpoints already ({', '.join(names)}). Resume with "
            "trainer.resume_mode=latest, or choose another folder"
        )


def _require_settings(chosen: Checkpoint, trainer: TrainingConfig) -> None:
    written, mine = chosen.state.settings, settings_of(trainer)
    if differing := [key for key in written | mine if written.get(key) != mine.get(key)]:
        raise ValueError(
            f"the checkpoint {chosen.folder} cannot be gone on with: "
            + ", ".join(f"{key} was {written.get(key)} and is {mine.get(key)}" for key in differing)
            + ". Give the same, or start a new run from a Hugging Face export (trainer.hf_save_interval)"
        )


def _run_dir(trainer: TrainingConfig) -> Path:
    return Path(trainer.run_dir).expanduser().resolve()
