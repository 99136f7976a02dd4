"""What the Ray actors of a run have in common: their log file and their place."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from pathlib import Path

import ray


def log_to(path: str) -> None:
    """Send everything that this process and its children print to a file, and let it be asked for its stacks.

    `kill -USR1 PID` writes the stacks of all threads to the file.
    """
    import signal

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def host() -> str:
    """Address of this node as the other nodes of the cluster see it."""
    return ray.util.get_node_ip_address()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
