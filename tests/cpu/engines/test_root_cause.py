"""Why an engine's core did not start (engines/vllm/root_cause.py), in what vLLM 0.26 and 0.32 write."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from skyrl_train.cluster.pool.engine_process import EngineProcess
from skyrl_train.engines.settings import EngineSettings
from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.engines.vllm.root_cause import root_cause
from tests.support.settings import engine_settings

STACK = """\
Traceback (most recent call last):
  File "/site/vllm/v1/engine/core.py", line 1299, in run_engine_core
    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/site/vllm/lora/ops/lora_shrink_op.py", line 177, in _lora_shrink
    assert inputs.dtype in [torch.float16, torch.bfloat16]
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""


def written(process: str, text: str, *, logged: bool = False) -> str:
    start = f"({process}) " + ("ERROR 11-22 09:52:13 [core.py:1330] " if logged else "")
    return textwrap.indent(text, start, lambda line: True)


def test_an_exception_without_a_message_is_reported_with_its_place():
    stack = STACK + "AssertionError\n"
    log = "engine-0: process 19199\n" + written(
        "EngineCore pid=7", "EngineCore failed to start.\n" + stack, logged=True
    )
    log += "Process EngineCore:\n" + written("EngineCore pid=7", stack) + "[rank0]: Warning: nothing of it\n"
    expected = "AssertionError (lora_shrink_op.py:177: assert inputs.dtype in [torch.float16, torch.bfloat16])"
    assert root_cause(log) == expected


def test_of_several_processes_the_first_that_raised_is_to_blame():
    worker = written("Worker_TP1 pid=9", STACK + "torch.OutOfMemoryError: CUDA out of memory.\n", logged=True)
    core = written("EngineCore pid=7", STACK + "Exception: WorkerProc initialization failed\n", logged=True)
    assert root_cause(worker + core) == "torch.OutOfMemoryError: CUDA out of memory."


def test_of_chained_exceptions_the_last_is_reported():
    chain = f"{STACK}KeyError: 'rope'\n\nDuring handling of the above exception, another exception occurred:\n\n{STACK}"
    assert root_cause(written("EngineCore pid=7", chain + "ValueError: no rope_type\n")) == "ValueError: no rope_type"


@pytest.mark.parametrize("log", ["", "engine-0: process 1\n", written("EngineCore pid=7", "Loading: done\n"), STACK])
def test_where_none_of_vllms_processes_raised_there_is_none(log: str):
    assert root_cause(log) is None


def test_an_engine_that_does_not_start_says_what_its_processes_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    actor = EngineProcess(str(tmp_path / "engine-0.log"))
    actor._log.write_text(written("EngineCore pid=3", STACK + "ValueError: of an earlier start\n"))

    def fails(engine: VllmEngine, settings: EngineSettings) -> None:
        with actor._log.open("a") as log:
            log.write(written("EngineCore pid=7", STACK + "ValueError: No available memory for the cache blocks\n"))
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    monkeypatch.setattr(VllmEngine, "__init__", fails)
    with pytest.raises(RuntimeError, match="^the engine could not start: ValueError: No available memory"):
        asyncio.run(actor.start(engine_settings(str(tmp_path), "m", "float32", 8)))
