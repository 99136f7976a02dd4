"""A process that ends soon after the one that started it, however that ended.

vLLM's core waits for requests for ever and keeps its device meanwhile. Ray ends the children of an actor that is
killed, but not where Ray's own processes end first: when its control store (GCS) dies, all of them do.
"""

from __future__ import annotations

import os
import threading
import time

LOOK_S = 1.0


def end_with_parent() -> None:
    """From now on, look every LOOK_S whether the parent lives. Call it early: a parent that is gone is not missed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
