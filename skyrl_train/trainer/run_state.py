"""Where a run stands between two steps, and the folders with which another process goes on from there.

`CKPT_PATH/global_step_N` holds a file of each policy rank (megatron/state.py) and checkpoint.json, which is written
last: a folder without it is no checkpoint. On several nodes CKPT_PATH must be one folder for all of them.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import OrderState
from skyrl_train.ranks import SavedState

log = logging.getLogger(__name__)

RECORD = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """A run after the update of a step."""

    global_step: int
    policy_version: int
    """Optimizer steps in the weights."""
    owes: bool
    """Whether an export or evaluation of the step was left out, because the run was told to stop."""
    order: OrderState
    num_ranks: int
    """Of the policy; each has a file."""
    settings: dict[str, Any]
    """`settings_of` the run."""
    run_id: str
    """That of run.json in the run's folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    number: int
    """Those that were written later have higher ones."""
    state: RunState

    @property
    def saved(self) -> SavedState:
        """For the ranks."""
        return SavedState(str(self.folder), self.state.policy_version)


def settings_of(trainer: TrainingConfig) -> dict[str, Any]:
    """Key -> value of all that must be as it was when a run goes on: the files of the ranks depend on the layout, steps
    and the learning rate on the batches, and adapters on the model that they adapt."""
    megatron, model = trainer.policy.megatron_config, trainer.policy.model
    sizes = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
    keys = {f"{kind}_parallel_size": getattr(megatron, f"{kind}_parallel_size") for kind in sizes}
    settings: dict[str, Any] = {f"trainer.policy.megatron_config.{key}": value for key, value in keys.items()}
    settings |= {
        "trainer.placement.policy_num_nodes * policy_num_gpus_per_node": trainer.placement.num_policy_ranks,
        "trainer.bf16": trainer.bf16,
        "trainer.train_batch_size": trainer.train_batch_size,
        "trainer.policy.model.lora.rank": model.lora.rank,
    }
    if isinstance(trainer, TrainerConfig):
        settings["trainer.policy_mini_batch_size"] = trainer.policy_mini_batch_size
        settings["trainer.update_epochs_per_batch"] = trainer.update_epochs_per_batch
    if model.lora.rank:
        settings["trainer.policy.model.path"] = model.path
        for key in ("alpha", "target_modules", "exclude_modules"):
            settings[f"trainer.policy.model.lora.{key}"] = getattr(model.lora, key)
    as_read: dict[str, Any] = json.loads(json.dumps(settings))
    return as_read


def load_checkpoint(folder: Path) -> Checkpoint:
    """Raises: ValueError if there is no checkpoint in the folder, or one that this program did not write."""
    try:
        record = json.loads((folder / RECORD).read_text())
        if record["format"] != FORMAT:
            raise ValueError(f"it has the format {record['format']}, and this version of skyrl_train reads {FORMAT}")
        order = OrderState(**record["state"].pop("order"))
        checkpoint = Checkpoint(folder, record["number"], RunState(order=order, **record["state"]))
    except FileNotFoundError:
        inside = sorted(path.parent.name for path in folder.glob(f"global_step_*/{RECORD}"))
        hint = f"; name one of {', '.join(inside)} in it" if inside else ""
        raise ValueError(f"{folder} is no whole checkpoint: it has no {RECORD}{hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / RECORD} cannot be read: {error}") from None
    if missing := _missing(checkpoint.folder, checkpoint.state):
        raise ValueError(f"{folder} is not whole: it has no {', '.join(missing)}")
    return checkpoint


class Checkpoints:
    """The checkpoints of one run in their folder."""

    def __init__(self, path: str, max_to_keep: int) -> None:
        """Args: max_to_keep: -1 means all."""
        self.path = Path(path).expanduser().resolve()
        self._max_to_keep = max_to_keep

    def all(self) -> list[Checkpoint]:
        """In the order in which they were written. Raises: ValueError as `load_checkpoint`."""
        found = [load_checkpoint(folder) for folder in self._folders() if (folder / RECORD).exists()]
        return sorted(found, key=lambda one: one.number)

    def folder(self, global_step: int) -> Path:
        return self.path / f"global_step_{global_step}"

    def begin(self, folder: Path) -> None:
        """Make it an empty place for the files of the ranks, and room by what others have left. Raises: OSError."""
        for other in self._folders():
            if not (other / RECORD).exists():
                self.discard(other)
        if folder.is_symlink():
            folder.unlink()
        _remove(folder)
        folder.mkdir(parents=True, exist_ok=True)

    def finish(self, folder: Path, state: RunState) -> None:
        """Make it a checkpoint, and let go of those that are too many.

        Raises: OSError, also if a rank wrote its file where this process does not see it.
        """
        if missing := _missing(folder, state):
            raise OSError(f"{folder} has no {', '.join(missing)}: trainer.ckpt_path must be one folder for all nodes")
        others = self._readable()
        number = 1 + max((one.number for one in others), default=0)
        _write(folder / RECORD, {"format": FORMAT, "number": number, "state": asdict(state)})
        if self._max_to_keep > 0:
            for other in others[: max(0, len(others) + 1 - self._max_to_keep)]:
                self.discard(other.folder)

    def discard(self, folder: Path) -> None:
        """Remove a checkpoint, or what was written of one. What is a link is the user's own."""
        if folder.is_symlink():
            return
        try:
            _remove(folder)
        except OSError as error:
            log.warning("the checkpoint %s could not be removed: %s", folder, error)

    def _readable(self) -> list[Checkpoint]:
        """As `all`, without those that it would raise for."""
        found = []
        for folder in self._folders():
            try:
                found.append(load_checkpoint(folder))
            except ValueError:
                continue
        return sorted(found, key=lambda one: one.number)

    def _folders(self) -> list[Path]:
        return [path for path in self.path.glob("global_step_*") if path.is_dir()]


def _missing(folder: Path, state: RunState) -> list[str]:
    names = [f"rank_{rank}.pt" for rank in range(state.num_ranks)]
    return [name for name in names if not (folder / name).exists()]


def _write(file: Path, content: dict[str, Any]) -> None:
    """All at once, and so that it outlives a loss of power."""
    draft = file.with_name(f".{file.name}.draft")
    with draft.open("w") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(folder: Path) -> None:
    """Remove what a checkpoint consists of, the record first, and the folder if nothing else is in it."""
    if not folder.exists():
        return
    (folder / RECORD).unlink(missing_ok=True)
    for file in (*folder.glob("rank_*.pt"), *folder.glob("rank_*.tmp"), folder / f".{RECORD}.draft"):
        file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
