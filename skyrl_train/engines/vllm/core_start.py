"""What the process of an engine's core imports first (`imports.first_in_children`): vLLM's core, in less time than vLLM
would, and a watch over its parent.

The core waits for requests forever and keeps its device meanwhile. Ray ends the children of an actor that is killed,
but not where Ray's own processes end first: when its control store (GCS) dies, all of them do.
"""

from __future__ import annotations

import os
import threading
import time

from skyrl_train.imports import quick_imports

LOOK_S = 1.0


def _end_with_parent() -> None:
    """End soon after the parent, however that ended. Called early: a parent that is gone is not missed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


_end_with_parent()
with quick_imports():
    import vllm.v1.engine.core  # noqa: F401
