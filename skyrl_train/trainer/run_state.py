"""State of a run between two steps, and the checkpoints from which another process resumes it.

`CKPT_PATH/global_step_N` holds a file of each policy rank (residency/state.py), those of critic ranks in a folder, the
finished groups of the source if it holds any, and checkpoint.json, written last, with size and digest of those files
and its own digest. Until then the record is a draft: a folder with neither is damaged, not unfinished. On several nodes
CKPT_PATH must be a shared folder. The driver verifies every digest before it starts a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from skyrl_train.file_sum import FileSum, problems_of, size_problems, sync_folder, write_durably
from skyrl_train.ranks import SavedState
from skyrl_train.tracking.run_dir import HeldFolder

log = logging.getLogger(__name__)

RECORD = "checkpoint.json"
DRAFT = f".{RECORD}.draft"
"""Name of the record while a checkpoint is written or removed."""
CRITIC = "critic"
"""Folder of the files of critic ranks."""
GROUPS = "groups.safetensors"
"""File of finished groups that are not trained yet."""
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
    """State of the source of rows or groups, such as data/order.py's OrderState."""
    num_ranks: int
    """Policy ranks; each has a file."""
    settings: dict[str, Any]
    run_id: str
    model: dict[str, Any]
    """Settings from which ranks build the model (`model_of`); identities of it and of frozen ones (hf/identity.py)."""
    critic_steps: int | None = None
    """Optimizer steps in the weights of the critic; None without one."""
    coefficients: dict[str, float] = field(default_factory=dict)
    """Weights that controllers have changed."""
    export: str | None = None
    """`export_sum` of the export of the same weights; None if the step has none."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files exist and have the right sizes."""

    folder: Path
    number: int
    """Order in which checkpoints were written."""
    state: RunState
    files: Mapping[str, FileSum]

    def verify(self) -> None:
        """Compare the digest of every file. Raises: ValueError, naming each file that was changed."""
        started, num_bytes = time.perf_counter(), sum(file.num_bytes for file in self.files.values())
        if problems := problems_of(self.folder, self.files):
            raise ValueError(f"{self.folder} is damaged: {'; '.join(problems)}")
        seconds = time.perf_counter() - started
        log.info("%s is intact: %.1f MB verified in %.1f s", self.folder, num_bytes / 1e6, seconds)

    @property
    def groups(self) -> bytes:
        """Finished groups of the source; empty if it held none. Raises: OSError."""
        return (self.folder / GROUPS).read_bytes() if GROUPS in self.files else b""

    @property
    def saved(self) -> SavedState:
        steps = self.state.critic_steps
        critic = None if steps is None else SavedState(str(self.folder / CRITIC), steps)
        return SavedState(str(self.folder), self.state.policy_version, critic)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint; verify its record's digest and the sizes of its files.

    Raises: ValueError if the folder has no checkpoint, or one that is damaged or of another version.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
        if record["format"] != FORMAT:
            raise ValueError(f"it has the format {record['format']}, and this version of skyrl_train reads {FORMAT}")
        if record.pop("sha256") != _digest(record):
            raise ValueError("it was changed after it was written (SHA-256 differs)")
        state = RunState(**record["state"])
        files = {name: FileSum(**file) for name, file in record["files"].items()}
        checkpoint = Checkpoint(folder, record["number"], state, files)
    except FileNotFoundError:
        if not folder.is_dir():
            raise ValueError(f"{folder} does not exist, so it is not a checkpoint. Name the folder of one") from None
        records = (*folder.glob(f"global_step_*/{RECORD}"), *folder.glob(f"checkpoints/global_step_*/{RECORD}"))
        inside = sorted(str(path.parent.relative_to(folder)) for path in records)
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

    @property
    def problem(self) -> str | None:
        """Sentence if the folder was moved or deleted since `begin`."""
        return None if self._held is None else self._held.problem

    @property
    def newest_problem(self) -> str | None:
        """Sentence about the last checkpoint if it no longer exists."""
        if self._newest is None or (self._newest / RECORD).exists():
            return None
        return f"the newest checkpoint, {self._newest}, was deleted while the run used its folder"

    def all(self) -> list[Checkpoint]:
        return self._sorted()[0]

    def names(self) -> list[str]:
        """Folder names of all checkpoints, including damaged ones."""
        return sorted(folder.name for folder in self._finished())

    def newest_intact(self) -> Checkpoint | None:
        """The newest one without damage; logs what is wrong with newer ones. Raises: ValueError if all are damaged."""
        readable, damage = self._sorted()
        for problem in damage:
            log.error("%s. This checkpoint is not used", problem)
        for checkpoint in reversed(readable):
            try:
                checkpoint.verify()
            except ValueError as error:
                if checkpoint.folder not in self._finished():  # the run has written a newer one and removed it
                    return self.newest_intact()
                log.error("%s. This checkpoint is not used", error)
                damage.append(str(error))
                continue
            if damage:
                log.warning("the newest intact checkpoint is %s", checkpoint.folder)
            return checkpoint
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
        """Create an empty folder for the ranks' files, and remove unfinished checkpoints. Raises: OSError."""
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

    def finish(
        self,
        folder: Path,
        state: RunState,
        sums: Sequence[FileSum],
        critic_sums: Sequence[FileSum] = (),
        groups: FileSum | None = None,
    ) -> None:
        """Write the record, read the checkpoint again, and only then remove the oldest beyond the number to keep.

        Args: sums: of each policy rank's file; critic_sums: of each critic rank's; groups: of GROUPS.
        Raises: OSError, also if a rank wrote its file to a folder that this process does not see.
        """
        files = {f"rank_{rank}.pt": file for rank, file in enumerate(sums)}
        files |= {f"{CRITIC}/rank_{rank}.pt": file for rank, file in enumerate(critic_sums)}
        files |= {} if groups is None else {GROUPS: groups}
        if problems := size_problems(folder, files):
            raise OSError(f"{folder}: {'; '.join(problems)}. trainer.ckpt_path must be one folder for all nodes")
        others = self.all()
        _write(folder, 1 + max((other.number for other in others), default=0), state, files)
        try:
            load_checkpoint(folder)
        except ValueError as error:
            raise OSError(str(error)) from error
        self._newest = folder
        if self._max_to_keep > 0:
            for other in others[: max(0, len(others) + 1 - self._max_to_keep)]:
                self.discard(other.folder)

    def continue_from(self, folder: Path) -> None:
        """Have `latest` find this checkpoint, not a later one that the run goes back behind; those are pruned first."""
        found = self.all()
        for chosen in (each for each in found[:-1] if each.folder == folder):
            with contextlib.suppress(OSError):  # later ones are then found until this run writes its own
                _write(folder, found[-1].number + 1, chosen.state, chosen.files)
                log.warning("trainer.resume_mode=latest now means %s, no longer %s", folder, found[-1].folder)

    def settle(self, state: RunState | None, export: str | None) -> None:
        """Note in the checkpoint with this pending state, if it is here, that work is done, with this `export_sum`."""
        for found in (each for each in self.all() if replace(each.state, pending=True) == state):
            with contextlib.suppress(OSError):  # the next start repeats the work
                settled = replace(found.state, pending=False, export=export or found.state.export)
                _write(found.folder, found.number, settled, found.files)

    def discard(self, folder: Path) -> None:
        """Remove a checkpoint or an unfinished one. Symbolic links are the user's and stay."""
        try:
            if not folder.is_symlink():
                _remove(folder)
        except OSError as error:
            log.warning("the checkpoint %s could not be removed: %s", folder, error)

    def _sorted(self) -> tuple[list[Checkpoint], list[str]]:
        """(readable checkpoints, oldest first; what is wrong with the others)"""
        found, damage = [], []
        for folder in self._finished():
            try:
                found.append(load_checkpoint(folder))
            except ValueError as error:
                if folder not in self._finished():
                    return self._sorted()
                damage.append(str(error))
        return sorted(found, key=lambda checkpoint: checkpoint.number), damage

    def _finished(self) -> list[Path]:
        """Complete and damaged ones; a folder without any file of a checkpoint is neither."""
        folders = [folder for folder in self._folders() if not _is_unfinished(folder)]
        return [folder for folder in folders if (folder / RECORD).exists() or any(folder.glob("rank_*.pt"))]

    def _folders(self) -> list[Path]:
        return [path for path in self.path.glob("global_step_*") if path.is_dir()]


def write_groups(folder: Path, data: bytes) -> FileSum | None:
    """Write the finished groups of a checkpoint, if there are any. Raises: OSError."""
    return write_durably(folder / GROUPS, data) if data else None


def _is_unfinished(folder: Path) -> bool:
    """Whether a process died while it wrote or removed the checkpoint."""
    return (folder / DRAFT).exists() and not (folder / RECORD).exists()


def _write(folder: Path, number: int, state: RunState, files: Mapping[str, FileSum]) -> None:
    """Write the record atomically and durably (a loss of power cannot corrupt it)."""
    record: dict[str, Any] = {"format": FORMAT, "number": number, "state": asdict(state)}
    record["files"] = {name: asdict(file) for name, file in files.items()}
    record["sha256"] = _digest(json.loads(json.dumps(record)))  # as it is read: its keys are text
    write_durably(folder / DRAFT, f"{json.dumps(record, indent=2)}\n".encode())
    (folder / DRAFT).replace(folder / RECORD)
    for path in (folder, folder.parent):
        sync_folder(path)


def _remove(folder: Path) -> None:
    """Remove a checkpoint's files, then its folder if it is empty.

    The record becomes a draft first, so that a crash leaves an unfinished checkpoint, not a damaged one.
    """
    if not folder.exists():
        return
    if (folder / RECORD).exists():
        (folder / RECORD).replace(folder / DRAFT)
    for states in (folder / CRITIC, folder):  # the draft last
        for file in (*states.glob("rank_*.pt"), *states.glob("rank_*.tmp"), states / GROUPS, states / DRAFT):
            file.unlink(missing_ok=True)
    if (folder / CRITIC).is_dir() and not any((folder / CRITIC).iterdir()):
        (folder / CRITIC).rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()
