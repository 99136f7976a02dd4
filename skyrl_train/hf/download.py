"""Download of a hub model into this node's cache, in a separate process that a deadline can end.

`python -m skyrl_train.hf.download NAME REVISION FOLDER` is that process. It writes `total` (bytes of the model) and, if
it fails, `error` into FOLDER.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from fnmatch import fnmatch
from pathlib import Path

from skyrl_train.hf.hub import PATTERNS, TWICE, cache_folder, name_and_revision

log = logging.getLogger(__name__)
MODULE = "skyrl_train.hf.download"
POLL_S = 0.2
REPORT_S = 15.0
"""Seconds between lines of progress."""
TIMEOUT = "trainer.download_timeout_s"


def download(key: str, path: str, timeout_s: float, limit: str = TIMEOUT) -> None:
    """Download a hub model unless this node has it. A folder needs no download.

    Args: key and its value, path, for errors; limit: name of timeout_s in them.
    Raises: ValueError if it cannot be downloaded, or not within timeout_s.
    """
    if Path(path).expanduser().is_dir():
        return
    name, revision = name_and_revision(path)
    with tempfile.TemporaryDirectory() as scratch:
        # In its own session, so that Ctrl-C reaches this process alone, which ends the other.
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, name, revision or "", scratch],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": python_path()},
            start_new_session=True,
        )
        try:
            _wait(process, _Progress(path, _cached(name), Path(scratch, "total")), key, timeout_s, limit)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            error = Path(scratch, "error")
            reason = error.read_text() if error.exists() else f"exit code {process.returncode}"
            raise _error(key, path, reason)


def config_folder(key: str, path: str) -> str:
    """The folder with a model's config.json, the only file of a hub model that is downloaded. Args and errors are those
    of `download`.
    """
    from huggingface_hub import hf_hub_download

    if (folder := Path(path).expanduser()).is_dir():
        return str(folder)
    name, revision = name_and_revision(path)
    try:
        return str(Path(hf_hub_download(name, "config.json", revision=revision)).parent)
    except Exception as error:  # every error of the library becomes one message
        raise _error(key, path, _reason(error)) from error


def _error(key: str, path: str, reason: str) -> ValueError:
    return ValueError(
        f"{key} is {path}: it is neither a folder nor can it be downloaded from the hub ({reason}). Name the folder of "
        "a Hugging Face checkpoint, or check the hub name, the network and, for a private or gated model, HF_TOKEN"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _wait(process: subprocess.Popen[bytes], progress: _Progress, key: str, timeout_s: float, limit: str) -> None:
    deadline, reported = time.monotonic() + timeout_s, time.monotonic()
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(POLL_S, max(0.0, deadline - time.monotonic())))
            progress.finish()
            return
        if time.monotonic() - reported > REPORT_S or not progress.is_shown:
            reported = time.monotonic()
            progress.show()
    raise ValueError(
        f"{limit} is {timeout_s:g}: {key}={progress.path} was not downloaded within this many seconds "
        f"({progress.amount()}). Raise it, or check the network; files that are complete are not downloaded again"
    )


class _Progress:
    """Lines about the bytes in the cache."""

    def __init__(self, path: str, blobs: Path, total: Path) -> None:
        self.path, self._blobs, self._total = path, blobs, total
        self._before, self._started = self._bytes(), time.monotonic()
        self.is_shown = False
        """Whether a line was logged, which is when the first bytes have arrived."""

    def show(self) -> None:
        if (num := self._bytes() - self._before) > 0:
            self.is_shown = True
            rate = num / (time.monotonic() - self._started) / 1e6
            log.info("downloading %s: %s, %.1f MB/s", self.path, self.amount(), rate)

    def finish(self) -> None:
        if (num := self._bytes() - self._before) > 0:
            log.info("downloaded %s: %s in %.0f s", self.path, _size(num), time.monotonic() - self._started)

    def amount(self) -> str:
        """Bytes that are there, of all if these are known."""
        text = self._total.read_text() if self._total.exists() else ""
        return f"{_size(self._bytes())}{f' of {_size(int(text))}' if text else ''} in {self._blobs.parent}"

    def _bytes(self) -> int:
        num = 0
        for file in self._blobs.glob("*"):
            with contextlib.suppress(OSError):  # renamed when it is complete
                num += file.stat().st_size
        return num


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def python_path() -> str:
    """PYTHONPATH of a child process, for this package: this process may have found it through its working directory."""
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def _cached(name: str) -> Path:
    return Path(cache_folder()) / f"models--{name.replace('/', '--')}" / "blobs"


def _write_total(name: str, revision: str | None, file: Path) -> None:
    """Without the hub there is no total, and the download itself says why."""
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception):
        files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
        wanted = [
            each.size or 0
            for each in files
            if any(fnmatch(each.rfilename, pattern) for pattern in PATTERNS)
            and not any(fnmatch(each.rfilename, pattern) for pattern in TWICE)
        ]
        file.with_suffix(".part").write_text(str(sum(wanted)))
        file.with_suffix(".part").rename(file)


def main(name: str, revision: str, folder: str) -> int:
    """Download, while another thread asks for the model's size. Returns the exit code."""
    from huggingface_hub import snapshot_download

    arguments = name, revision or None, Path(folder, "total")
    threading.Thread(target=_write_total, args=arguments, daemon=True).start()
    try:
        snapshot_download(name, revision=revision or None, allow_patterns=PATTERNS, ignore_patterns=TWICE)
    except Exception as error:  # every error of the library becomes one message
        Path(folder, "error").write_text(_reason(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
