"""A worker extension for tests: an engine whose worker dies in the middle of taking in weights, when a file says so.

`SKYRL_TEST_DEATH` names the file; the first worker that finds it removes it and does what it says: "core" kills
its process, "actor" the process above it, "stop" stops its own for good.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from skyrl_train.engines.vllm.worker.layerwise import LayerwiseReload
from skyrl_train.engines.vllm.worker.transfer import SyncExtension

VARIABLE = "SKYRL_TEST_DEATH"
EXTENSION = f"{__name__}.DyingExtension"
_load = LayerwiseReload.load


def load(self: LayerwiseReload, named_tensors: Any) -> None:
    _load(self, named_tensors)
    order = Path(os.environ[VARIABLE])
    taken = order.with_suffix(f".{os.getpid()}")
    try:
        order.rename(taken)
    except FileNotFoundError:
        return
    what = taken.read_text()
    if what == "actor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # its parent's end is this process's end
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)


class DyingExtension(SyncExtension):
    """The extension, unchanged; importing this module does the rest."""


LayerwiseReload.load = load  # type: ignore[method-assign]
