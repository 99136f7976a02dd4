"""The process of an engine's core does not outlive the one that started it, even if nobody is left to end it."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

# It waits for the child's watch, a second thread: until then the child does not know whose child it is.
PARENT = """
import multiprocessing, os, signal, sys, time
import psutil
from skyrl_train.imports import first_in_children
with first_in_children(sys.argv[1]):
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
until = time.monotonic() + 20
while psutil.Process(child.pid).num_threads() < 2 and time.monotonic() < until:
    time.sleep(0.05)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_core_ends_with_the_process_that_started_it():
    command = [sys.executable, "-c", PARENT, "skyrl_train.engines.vllm.core_start"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        try:
            assert parent.wait(30) == -signal.SIGKILL
            _, alive = psutil.wait_procs([core], timeout=20)
            assert not alive, "the core lives on"
        finally:
            parent.kill()
            if core.is_running():
                core.kill()
