"""Where a run stands between two steps, and the folders with which another process goes on from there.

`CKPT_PATH/global_step_N` holds a file of each policy rank (residency/state.py) and checkpoint.json, which is written
last, with size and digest of those files, as the ranks hashed them on their way to the disk, and with its own digest.
Until then it has the name of a draft: a folder with neither is damaged, and not just unfinished. On several nodes
CKPT_PATH must be one folder for all of them.

The driver checks every digest before anything is started, so that the choice of an older checkpoint needs no process
to be started again. It reads the files in threads, and leaves them in the page cache for the ranks of its node.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.file_sum import FileSum, problems_of, size_problems
from skyrl_train.ranks import SavedState
from skyrl_train.tracking.held_folder import HeldFolder

log = logging.getLogger(__name__)

RECORD = "checkpoint.json"
DRAFT = f".{RECORD}.draft"
"""Name of the record while the checkpoint is written or removed."""
FORMAT = 2
"""2 added digests; without them nothing can be verified, so format 1 is refused."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run after the update of a step."""

    global_step: int
    policy_version: int
    """Optimizer steps in the weights."""
    pending: bool
    """Whether an export or evaluation of the step was skipped after a stop request."""
    source: dict[str, Any]
    """Where the next rows or groups come from; of a position in rows the fields of data/order.py's OrderState."""
    num_ranks: int
    """Of the policy; each has a file."""
    settings: dict[str, Any]
    """`settings_of` the run."""
    run_id: str
    """That of run.json in the run's folder."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are there and have the right sizes."""

    folder: Path
    number: int
    """Those that were written later have higher ones."""
    state: RunState
    files: Mapping[str, FileSum]

    def verify(self) -> None:
        """Compare the digest of every file. Raises: ValueError, naming each file that was changed."""
        started, num_bytes = time.perf_counter(), sum(one.num_bytes for one in self.files.values())
        if problems := problems_of(self.folder, self.files):
            raise ValueError(f"{self.folder} is damaged: {'; '.join(problems)}")
        seconds = time.perf_counter() - started
        log.info("%s is intact: %.2f GB verified in %.1f s", self.folder, num_bytes / 1e9, seconds)

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
        if trainer.source != "on_policy":
            settings["trainer.source"] = trainer.source
        settings["trainer.policy_mini_batch_size"] = trainer.policy_mini_batch_size
        settings["trainer.update_epochs_per_batch"] = trainer.update_epochs_per_batch
    if model.lora.rank:
        settings["trainer.policy.model.path"] = model.path
        for key in ("alpha", "target_modules", "exclude_modules"):
            settings[f"trainer.policy.model.lora.{key}"] = getattr(model.lora, key)
    as_read: dict[str, Any] = json.loads(json.dumps(settings))
    return as_read


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the record and compare it with its own digest, and the sizes of the files with it.

    Raises: ValueError if there is no checkpoint in the folder, it is damaged, or another version wrote it.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
        if record["format"] != FORMAT:
            raise ValueError(f"it has the format {record['format']}, and this version of skyrl_train reads {FORMAT}")
        if record.pop("sha256") != _digest(record):
            raise ValueError("it was changed after it was written (SHA-256 differs)")
        values = record["state"]
        for name, old in (("source", "order"), ("pending", "owes")):  # names in older checkpoints
            if old in values:
                values[name] = values.pop(old)
        state = RunState(**values)
        files = {name: FileSum(**one) for name, one in record["files"].items()}
        checkpoint = Checkpoint(folder, record["number"], state, files)
    except FileNotFoundError:
        inside = sorted(path.parent.name for path in folder.glob(f"global_step_*/{RECORD}"))
        hint = f". Name one of {', '.join(inside)} in it" if inside else ""
        raise ValueError(f"{folder} is not a complete checkpoint: it has no {RECORD}{hint}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / RECORD} cannot be read: {error}") from None
    if problems := size_problems(folder, checkpoint.files):
        raise ValueError(f"{folder} is damaged: {'; '.join(problems)}")
    return checkpoint


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run in their folder."""

    def __init__(self, path: str, max_to_keep: int) -> None:
        """Args: max_to_keep: -1 means all."""
        self.path = Path(path).expanduser().resolve()
        self._max_to_keep = max_to_keep
        self._held: HeldFolder | None = None
        self._newest: Path | None = None
        """Folder of the checkpoint that this object wrote last."""

    @property
    def problem(self) -> str | None:
        """What happened to the folder since the first checkpoint of this object was begun, as a sentence."""
        return None if self._held is None else self._held.problem

    @property
    def newest_problem(self) -> str | None:
        """Whether the checkpoint that was written last is there no longer, as a sentence."""
        if self._newest is None or (self._newest / RECORD).exists():
            return None
        return f"the newest checkpoint, {self._newest}, was deleted while the run used its folder"

    def all(self) -> list[Checkpoint]:
        """Those that `load_checkpoint` can read, in the order in which they were written."""
        return self._sorted()[0]

    def names(self) -> list[str]:
        """Folders of all checkpoints, also of damaged ones."""
        return sorted(folder.name for folder in self._finished())

    def newest_intact(self) -> Checkpoint | None:
        """Verify the newest, and then the older ones until one is intact; log what is wrong with the others.

        Raises: ValueError if there are checkpoints and all of them are damaged.
        """
        readable, damage = self._sorted()
        for problem in damage:
            log.error("%s. This checkpoint is not used", problem)
        for one in reversed(readable):
            try:
                one.verify()
            except ValueError as error:
                log.error("%s. This checkpoint is not used", error)
                damage.append(str(error))
                continue
            if damage:
                log.warning("the newest intact checkpoint is %s", one.folder)
            return one
        if damage:
            raise ValueError(
                f"trainer.ckpt_path is {self.path}: none of its checkpoints is intact ({'; '.join(damage)}). To start "
                "again from the model, move them out of this folder; to keep older ones as a reserve, raise "
                "trainer.max_ckpts_to_keep"
            )
        return None

    def folder(self, global_step: int) -> Path:
        return self.path / f"global_step_{global_step}"

    def begin(self, folder: Path) -> None:
        """Make it an empty place for the files of the ranks, and room by what others have left. Raises: OSError."""
        for other in self._folders():
            if _is_unfinished(other):
                self.discard(other)
        if folder.is_symlink():
            folder.unlink()
        _remove(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self._held is not None and self.problem is not None:
            self._held.close()
            self._held = None
        if self._held is None:
            self._held = HeldFolder(self.path, "trainer.ckpt_path")
        (folder / DRAFT).touch()

    def finish(self, folder: Path, state: RunState, sums: Sequence[FileSum]) -> None:
        """Make it a checkpoint and read it again; only then remove the oldest beyond the number to keep.

        Args: sums: of the files of the ranks.
        Raises: OSError, also if a rank wrote its file where this process does not see it.
        """
        files = {f"rank_{rank}.pt": one for rank, one in enumerate(sums)}
        if problems := size_problems(folder, files):
            raise OSError(f"{folder}: {'; '.join(problems)}. trainer.ckpt_path must be one folder for all nodes")
        others = self.all()
        number = 1 + max((one.number for one in others), default=0)
        record = {"format": FORMAT, "number": number, "state": asdict(state)}
        record["files"] = {name: asdict(one) for name, one in files.items()}
        _write(folder, record | {"sha256": _digest(record)})
        try:
            load_checkpoint(folder)
        except ValueError as error:
            raise OSError(str(error)) from error
        self._newest = folder
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

    def _sorted(self) -> tuple[list[Checkpoint], list[str]]:
        """Readable checkpoints in the order in which they were written, and what is wrong with the others."""
        found, damage = [], []
        for folder in self._finished():
            try:
                found.append(load_checkpoint(folder))
            except ValueError as error:
                damage.append(str(error))
        return sorted(found, key=lambda one: one.number), damage

    def _finished(self) -> list[Path]:
        return [folder for folder in self._folders() if _has_parts(folder) and not _is_unfinished(folder)]

    def _folders(self) -> list[Path]:
        return [path for path in self.path.glob("global_step_*") if path.is_dir()]


def _has_parts(folder: Path) -> bool:
    return (folder / RECORD).exists() or any(folder.glob("rank_*.pt"))


def _is_unfinished(folder: Path) -> bool:
    """Whether a process ended while it wrote or removed the checkpoint."""
    return (folder / DRAFT).exists() and not (folder / RECORD).exists()


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record at once, and so that it survives a loss of power."""
    with (folder / DRAFT).open("w") as stream:
        stream.write(json.dumps(record, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    (folder / DRAFT).replace(folder / RECORD)
    for one in (folder, folder.parent):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint and then its folder, if nothing else is in it.

    First the record becomes a draft, which makes it an unfinished checkpoint and not a damaged one.
    """
    if not folder.exists():
        return
    if (folder / RECORD).exists():
        (folder / RECORD).replace(folder / DRAFT)
    for file in (*folder.glob("rank_*.pt"), *folder.glob("rank_*.tmp"), folder / DRAFT):
        file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
