"""Temporary files of an engine end with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from skyrl_train.cluster.pool.engine_process import kill_processes
from skyrl_train.engines.vllm.scratch import PREFIX, Scratch, remove_abandoned
from tests.support.tiny import write_tiny_model

HOLD = """
import sys, tempfile
from pathlib import Path
from skyrl_train.engines.vllm.scratch import scratch
scratch().enter()
tempfile.mkdtemp()
print(scratch().path, flush=True)
sys.stdin.read()
"""
START_AND_END = """
import asyncio, os, sys
from pathlib import Path
from skyrl_train.engines.vllm.engine import VllmEngine
from tests.support.settings import MIB, engine_settings

async def start_and_end(model):
    settings = engine_settings(model, "tiny", "float32", 64, kv_cache_memory_gb=16 * MIB)
    try:
        engine = VllmEngine(settings)
    except Exception:
        return "failed"
    await engine.start(waits_for_weights=False)
    await engine.shutdown()
    return "ended"

async def main():
    for model in sys.argv[1:]:
        print("result:", await start_and_end(model), [path.name for path in Path(os.environ["TMPDIR"]).rglob("*")])

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def holder(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_kept(folder: Path):
    with holder(folder) as killed, holder(folder) as living:
        assert killed.stdout is not None and living.stdout is not None
        gone, kept = (Path(process.stdout.readline().strip()) for process in (killed, living))  # type: ignore[union-attr]
        assert sorted(folder.iterdir()) == sorted([gone, kept])
        assert all(len(list(path.iterdir())) == 2 for path in (gone, kept)), "the lock and what tempfile made"
        killed.kill()
        killed.wait()
        remove_abandoned(folder)
        assert list(folder.iterdir()) == [kept]
        living.kill()


def test_the_folder_of_an_engine_that_is_killed_by_its_driver_is_removed_at_once(folder: Path):
    with holder(folder) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        kill_processes(((process.pid, psutil.Process(process.pid).create_time()),), path)
        assert list(folder.iterdir()) == []


def test_what_is_none_of_an_engines_folders_is_left_alone(folder: Path):
    others = [folder / "other", folder / f"{PREFIX}file", folder / f"{PREFIX}without_a_lock"]
    others[0].mkdir()
    others[1].touch()
    others[2].mkdir()
    (folder / f"{PREFIX}link").symlink_to(folder / "other")
    remove_abandoned(folder)
    assert len(list(folder.iterdir())) == 4


def test_the_last_engine_of_a_process_removes_the_folder_and_the_next_one_has_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", "/before")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    scratch = Scratch(folder)
    try:
        for _ in range(2):
            scratch.enter()
            scratch.enter()
            scratch.leave()
            assert tempfile.gettempdir() == os.environ["VLLM_RPC_BASE_PATH"] == str(scratch.path)
            scratch.leave()
            assert os.environ["TMPDIR"] == "/before" and "VLLM_RPC_BASE_PATH" not in os.environ
            assert list(folder.iterdir()) == []
    finally:
        tempfile.tempdir = None


@pytest.mark.slow
def test_an_engine_leaves_nothing_in_the_folder_for_temporary_files(folder: Path, tmp_path: Path):
    """One that fails to start, and one that is shut down after it in the same process."""
    model, damaged = (write_tiny_model(tmp_path / name, seed=1) for name in ("model", "damaged"))
    save_file({"unknown": torch.zeros(1)}, damaged / "model.safetensors", metadata={"format": "pt"})
    program = tmp_path / "start_and_end.py"
    program.write_text(START_AND_END)
    done = subprocess.run(
        [sys.executable, str(program), str(damaged), str(model)],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("result:")]
    assert results == ["result: failed []", "result: ended []"], done.stdout + done.stderr
    assert list(folder.rglob("*")) == []
