"""Why an engine's core did not start (inference/root_cause.py), in what vLLM 0.26 and 0.32 write."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from skyrl_train.inference.root_cause import root_cause
from tests.cpu.jobs import run_to_end, write_world

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


def test_an_exception_without_a_message_is_told_with_its_place():
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


def test_of_exceptions_that_follow_one_another_the_last_is_told():
    chain = f"{STACK}KeyError: 'rope'\n\nDuring handling of the above exception, another exception occurred:\n\n{STACK}"
    assert root_cause(written("EngineCore pid=7", chain + "ValueError: no rope_type\n")) == "ValueError: no rope_type"


@pytest.mark.parametrize("log", ["", "engine-0: process 1\n", written("EngineCore pid=7", "Loading: done\n"), STACK])
def test_where_none_of_vllms_processes_raised_there_is_none(log: str):
    assert root_cause(log) is None


@pytest.mark.slow
def test_a_run_says_what_vllm_raised(tmp_path: Path):
    world = write_world(tmp_path / "world")
    code, job = run_to_end(world, "+generator.engine_init_kwargs={kv_cache_memory_bytes: 100}")
    assert code == 1
    assert "engine-0 failed to start: RuntimeError: vLLM could not start: ValueError: No available memory" in job.output
