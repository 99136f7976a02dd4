"""A weight transport of your own (docs/extending.md): files in a folder that policy and engines share."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.weight_sync.channels.channel import ReceiveChannel, ReceivingEnd, SendingEnd
from skyrl_train.weight_sync.channels.table import Transport
from skyrl_train.weight_sync.control import Check, WeightSyncError
from skyrl_train.weight_sync.transport import Sender

FOLDER = tempfile.gettempdir()
"""Across hosts: a folder of a shared file system, with room for the model."""

FILES = Transport(send="own_transport:send", receive="own_transport:receive")


def send(end: SendingEnd) -> Sender:
    """The end of a rank."""
    return Sender(FileSender(), end.bucket_bytes, end.post)


def receive(end: ReceivingEnd) -> ReceiveChannel:
    """The end of an engine's worker."""
    return FileReceiver(end)


class FileSender:
    """Writes each bucket into a file, from which all engines read it."""

    max_bucket_bytes = 1 << 30

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weights_", dir=FOLDER))
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._update = self._bucket = 0

    @property
    def init_info(self) -> dict[str, Any]:
        return {"folder": str(self._folder)}

    def connect(self, check: Check) -> None:
        """Files need no connection."""

    def begin(self) -> None:
        for file in self._folder.iterdir():  # of the last update, which every engine has loaded
            file.unlink()
        self._update, self._bucket = self._update + 1, 0

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer

    def publish(self, num_bytes: int) -> None:
        file = self._folder / f"{self._update}_{self._bucket}"
        part = file.with_suffix(".part")
        part.write_bytes(self._buffer[:num_bytes].numpy())
        part.rename(file)  # so that no receiver reads half a bucket
        self._bucket += 1

    def drain(self, check: Check) -> None:
        """`Sender` waits for the engines' answers, and the files stay until then."""

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class FileReceiver:
    """Reads the buckets in one worker of an engine."""

    def __init__(self, end: ReceivingEnd) -> None:
        self._end, self._folder = end, Path(end.info["folder"])
        self._sizes: Sequence[int] = ()
        self._update = self._bucket = 0

    def begin(self, sizes: Sequence[int]) -> None:
        self._update, self._bucket, self._sizes = self._update + 1, 0, sizes

    def next(self) -> Tensor:
        file = self._folder / f"{self._update}_{self._bucket}"
        deadline = time.monotonic() + self._end.timeout_s
        while not file.exists():
            if not self._folder.exists():
                raise WeightSyncError("the sender gave up this weight update")
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{file} was not written within {self._end.timeout_s:g} s")
            time.sleep(0.005)
        return torch.from_file(str(file), size=self._sizes[self._bucket], dtype=torch.uint8).to(self._end.device)

    def release(self) -> None:
        self._bucket += 1

    def close(self) -> None:
        """The sender removes the files."""
