"""A quick start of an engine's core process, which ends with its parent.

A process that multiprocessing spawns first runs the parent's `__main__` (in a Ray actor: Ray's worker), and vLLM (0.32)
has no hook before its core is imported. So the core runs this module instead: 5 s of CPU instead of 8.

The core keeps its device while it waits for requests. Ray ends the children of an actor that is killed, but not when
Ray's own processes end first: if its control store (GCS) dies, all of them do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from skyrl_train.imports import quick_imports

POLL_S = 1.0


@contextlib.contextmanager
def quick_core_start() -> Iterator[None]:
    """Have processes that are spawned in this block run this module instead of `__main__`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[__name__]
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


if __name__ == "__mp_main__":
    _end_with_parent()
    with quick_imports():
        import vllm.v1.engine.core  # noqa: F401
