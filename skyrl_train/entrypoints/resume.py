"""The checkpoint from which a run resumes, found and verified before anything is started."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from skyrl_train.checks.model_folder import loaded_from
from skyrl_train.checks.training import MODEL
from skyrl_train.config.policy import ScoringModel
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import OrderState
from skyrl_train.hf.checkpoint import export_sum
from skyrl_train.hf.hub import local_folder, seen_from_anywhere
from skyrl_train.hf.identity import change, has_frozen_weights, identity
from skyrl_train.rollout.source import SOURCES
from skyrl_train.tracking.run_dir import lock_folder, read_record
from skyrl_train.tracking.writable import require_writable
from skyrl_train.trainer.from_config import settings_of
from skyrl_train.trainer.run_state import Checkpoint, Checkpoints, load_checkpoint

log = logging.getLogger(__name__)
REMEDY = "Use the same values, or start a new run from a Hugging Face export (trainer.hf_save_interval)"


def lock_checkpoints(trainer: TrainingConfig) -> TextIO | None:
    """Lock trainer.ckpt_path until the file is closed: two runs would remove each other's checkpoints.

    None for a folder in the run's own folder, which has a lock, or if this run writes no checkpoints.
    Raises: ValueError if another run holds the lock, or the folder cannot be created.
    """
    path = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep).path
    if trainer.ckpt_interval < 0 or path.is_relative_to(_run_dir(trainer)):
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
        return lock_folder(path, "trainer.ckpt_path", "Choose another folder")
    except OSError as error:
        raise ValueError(
            f"trainer.ckpt_path is {path}: the folder cannot be created ({error}). Choose another folder"
        ) from error


def require_export_folder(trainer: TrainingConfig, num_steps: int) -> None:
    """Raises: ValueError if trainer.export_path cannot be written; the last step would be the first to notice. Or if an
    export of one of the steps could replace a model of the run.
    """
    path = Path(trainer.export_path).expanduser().resolve()
    for folder, key in loaded_from(trainer).items():
        step = folder.name.removeprefix("global_step_")
        if folder.parent == path and step.isdigit() and int(step) <= num_steps and trainer.hf_save_interval != 0:
            raise ValueError(
                f"trainer.export_path is {path}: an export could replace {folder}, from which the run loads {key}. "
                "Choose another folder"
            )
    if trainer.hf_save_interval != 0 and not path.is_relative_to(_run_dir(trainer)):
        instead = "Choose another folder, or set trainer.hf_save_interval=0"
        require_writable("trainer.export_path", trainer.export_path, path, instead)


def identities(trainer: TrainingConfig, model_folder: str) -> dict[str, Any]:
    """Identity of the policy's model, for checkpoints; under `frozen` those of a reference, of teachers and of a critic
    that the run starts, by the key of their path, with that path. Raises: OSError or ValueError if a folder cannot be
    read.
    """
    has_frozen = has_frozen_weights(trainer.policy.model.lora, trainer.policy.megatron_config)
    found = identity(model_folder, has_frozen_weights=has_frozen)
    found["frozen"] = {}
    for model, on_ranks in _frozen(trainer):
        folder = local_folder(model.model_path)
        try:
            own = identity(folder, has_frozen_weights=not model.is_trained or model.megatron_config.freeze_moe_router)
        except ValueError as error:
            if on_ranks:
                raise
            log.warning("a resumed run could not recognise the weights of %s %s: %s", model.path_key, folder, error)
            own = identity(folder, has_frozen_weights=False)  # engines also load other files
        found["frozen"][model.path_key] = own | {"path": seen_from_anywhere(model.model_path)}
    return found


def chosen_checkpoint(trainer: TrainingConfig, num_rows: int, model_folder: str | None = None) -> Checkpoint | None:
    """The checkpoint of `trainer.resume_mode`; None if the run starts from the model.

    Args: model_folder: of the policy's model, which must be the one on which the run began; None to skip that check.
    Raises: ValueError if the checkpoint cannot be resumed from, or ckpt_path holds those of another run.
    """
    checkpoints = Checkpoints(trainer.ckpt_path, trainer.max_ckpts_to_keep)
    chosen = None
    if trainer.resume_mode == "latest":
        chosen = checkpoints.newest_intact()
        if chosen is None:
            log.info("no checkpoint in %s: starting from the model", checkpoints.path)
    elif trainer.resume_mode == "from_path":
        assert trainer.resume_path is not None, "checks/training.py asks for it"
        chosen = load_checkpoint(Path(trainer.resume_path).expanduser().resolve())
        chosen.verify()
    is_resumed = chosen is not None and chosen.folder.is_relative_to(checkpoints.path)
    is_own = checkpoints.path.is_relative_to(_run_dir(trainer))  # whose earlier run is renamed
    if trainer.ckpt_interval > 0 and not is_resumed and not is_own and (names := checkpoints.names()):
        raise ValueError(
            f"trainer.ckpt_path is {checkpoints.path}: it already contains checkpoints ({', '.join(names)}). Resume "
            "with trainer.resume_mode=latest, or choose another folder"
        )
    if chosen is not None:
        _require_settings(chosen, trainer)
        if model_folder is not None and (difference := change(chosen.state.model, model_folder)):
            raise ValueError(
                f"cannot resume from checkpoint {chosen.folder}: its run began with another model. "
                f"{MODEL} {trainer.policy.model.path} {difference}. {REMEDY}"
            )
        _require_frozen(chosen, trainer)
        if not isinstance(trainer, TrainerConfig) or trainer.source in SOURCES:
            state = chosen.state.source
            OrderState.read(state.get("order", state)).require(num_rows, trainer.seed)
    return chosen


def with_missing_export(checkpoint: Checkpoint, trainer: TrainingConfig, num_steps: int) -> Checkpoint:
    """The checkpoint, whose last export and evaluation are pending if the run ends at its step and it has no export: a
    longer run wrote it, or one without exports.
    """
    state = checkpoint.state
    lacks = state.global_step >= num_steps and state.export is None and trainer.hf_save_interval != 0
    if lacks and export_sum(Path(trainer.export_path).expanduser() / f"global_step_{state.global_step}") is not None:
        return checkpoint  # by a version that noted no exports, or by export_hf
    return replace(checkpoint, state=replace(state, pending=state.pending or lacks))


def resumes_in_its_folder(trainer: TrainingConfig, chosen: Checkpoint | None) -> bool:
    """Whether the folder of the run holds the run that is resumed."""
    if chosen is None:
        return False
    path = _run_dir(trainer)
    return chosen.folder.is_relative_to(path) or read_record(path).get("run_id") == chosen.state.run_id


def _require_settings(chosen: Checkpoint, trainer: TrainingConfig) -> None:
    written, mine = chosen.state.settings, settings_of(trainer)
    if differing := [key for key in written | mine if written.get(key) != mine.get(key)]:
        raise ValueError(
            f"cannot resume from checkpoint {chosen.folder}: "
            + ", ".join(f"{key} was {written.get(key)}, now {mine.get(key)}" for key in differing)
            + f". {REMEDY}"
        )


def _frozen(trainer: TrainingConfig) -> list[tuple[ScoringModel, bool]]:
    """The reference, teachers and critic that the run starts, and whether they have ranks, not engines."""
    if not isinstance(trainer, TrainerConfig):
        return []
    on_ranks = [*trainer.frozen_models, *(model for model in trainer.scoring_models if model.is_trained)]
    return [*((model, True) for model in on_ranks), *((model, False) for model in trainer.engine_teachers)]


def _require_frozen(chosen: Checkpoint, trainer: TrainingConfig) -> None:
    """By default a reference has the policy's path, which may change where all weights are trained."""
    older = {"trainer.ref.model.path": chosen.state.model.get("reference")}
    kept = chosen.state.model.get("frozen", older)
    for model, on_ranks in _frozen(trainer):
        own, key, kind = kept.get(model.path_key), model.path_key, "teacher" if model.is_teacher else model.name
        if own is not None and (difference := change(own, local_folder(model.model_path), on_ranks=on_ranks)):
            raise ValueError(
                f"cannot resume from checkpoint {chosen.folder}: the {kind} of its run was {own['path']}, and "
                f"{key} {model.model_path} {difference}. The objective would change. Set {key} to "
                "the model of the run, or start a new run from a Hugging Face export (trainer.hf_save_interval)"
            )


def _run_dir(trainer: TrainingConfig) -> Path:
    return Path(trainer.run_dir).expanduser().resolve()
