"""Downloads to the nodes of a cluster; the nodes are recorded, not real."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from skyrl_train.cluster import downloads
from skyrl_train.cluster.downloads import Load, download_to_nodes, require_shared
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool import engine_process
from skyrl_train.cluster.pool.settings import teacher_engine_settings
from skyrl_train.config import load_config
from skyrl_train.hf.download import download
from tests.support.settings import engine_settings

HERE, KEY = "driver's", "trainer.policy.model.path"


class Context:
    def get_node_id(self) -> str:
        return HERE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []

    async def on_node(node: str, function: Any, *args: Any) -> None:
        made.append((node, function, *args))

    monkeypatch.setattr(downloads, "on_node", on_node)
    monkeypatch.setattr(downloads.ray, "get_runtime_context", Context)
    monkeypatch.setattr(downloads.ray, "nodes", lambda: [{"NodeID": "b", "NodeManagerAddress": "10.0.0.2"}])
    monkeypatch.setattr(downloads, "seen_from_anywhere", lambda path: path if "/" in path[:1] else f"{path}@c0ffee")
    return made


def load(path: str, *nodes: str, key: str = KEY) -> Load:
    return Load(key, path, [Slot(None, 1, 0, node=node) for node in nodes])  # type: ignore[arg-type]


def test_each_other_node_downloads_each_of_its_models_once(calls: list[tuple[Any, ...]], tmp_path: Path):
    policy = load("org/policy", HERE, "a", "a", "b")
    reference = load("org/policy", "b", "c", key="trainer.ref.model.path")
    teacher = load("org/teacher", "c", "c", key="trainer.teacher.model.path")
    asyncio.run(download_to_nodes([policy, reference, teacher, load(str(tmp_path), "d")], 9.0))
    assert {(node, path) for node, _, _, path, _ in calls} == {
        ("a", "org/policy@c0ffee"),
        ("b", "org/policy@c0ffee"),
        ("c", "org/policy@c0ffee"),
        ("c", "org/teacher@c0ffee"),
    }
    assert len(calls) == 4 and all(call[1] is download and call[4] == 9.0 for call in calls)


def test_an_error_of_a_node_names_it(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch):
    async def fails(node: str, *args: Any) -> None:
        raise RayTaskError("download", "stack", ValueError("trainer.download_timeout_s is 9: too slow"))

    monkeypatch.setattr(downloads, "on_node", fails)
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.2: trainer\.download_timeout_s is 9: too slow"):
        asyncio.run(download_to_nodes([load("org/policy", "b")], 9.0))


def test_a_node_that_does_not_answer_is_not_waited_for(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    async def hangs(node: str, *args: Any) -> None:
        await asyncio.sleep(1000)

    monkeypatch.setattr(downloads, "on_node", hangs)
    monkeypatch.setattr(downloads, "GRACE_S", 0.1)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"trainer\.download_timeout_s is 0\.1: node 10\.0\.0\.2 did not answer"):
        asyncio.run(download_to_nodes([load("org/policy", "b")], 0.1))
    trainer = load_config([f"trainer.run_dir={tmp_path}/runs/a"]).trainer
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.2 cannot say if .*ckpt_path.*: no answer within 0\.1"):
        asyncio.run(require_shared(trainer, [Slot(None, 1, 0, node="b")]))  # type: ignore[arg-type]
    assert time.monotonic() - started < 100


@pytest.mark.parametrize("is_shared", [True, False])
def test_checkpoints_and_exports_of_other_nodes_need_a_shared_folder(
    is_shared: bool, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    async def on_node(node: str, function: Any, probes: dict[str, str]) -> Any:
        assert node == "b" and all(Path(file).is_relative_to(tmp_path) for file in probes.values())
        return function(probes if is_shared else {key: f"{file}.elsewhere" for key, file in probes.items()})

    monkeypatch.setattr(downloads, "on_node", on_node)
    slots = [Slot(None, 1, 0, node=node) for node in (HERE, "b")]  # type: ignore[arg-type]
    trainer = load_config([f"trainer.run_dir={tmp_path}/runs/a"]).trainer
    if is_shared:
        asyncio.run(require_shared(trainer, slots))
    else:
        asyncio.run(require_shared(trainer, slots[:1]))
        with pytest.raises(ValueError, match=r"trainer.ckpt_path is .*: ranks on node 10.0.0.2 would write there"):
            asyncio.run(require_shared(trainer, slots))
        nothing = load_config(["trainer.ckpt_interval=-1", "trainer.hf_save_interval=0"]).trainer
        asyncio.run(require_shared(nothing, slots))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_on_a_new_node_downloads_its_model(monkeypatch: pytest.MonkeyPatch):
    downloaded = list[str]()

    def local_folder(path: str) -> str:
        if path not in downloaded:
            raise ValueError(f"model {path!r} is neither a folder nor complete in this node's cache")
        return f"/cache/{path}"

    monkeypatch.setattr(engine_process, "local_folder", local_folder)
    monkeypatch.setattr(
        engine_process, "download", lambda key, path, timeout_s, limit: downloaded.extend((path, key, limit))
    )
    settings = engine_settings("org/policy", "name", "float32", max_model_len=64)
    assert engine_process._on_this_node(settings).model_path == "/cache/org/policy"
    config = load_config(["trainer.teacher.backend=engine", "trainer.teacher.model.path=org/teacher"])
    teacher = teacher_engine_settings(config, config.trainer.engine_teachers[0], 64, "shm")[0]
    engine_process._on_this_node(teacher)
    limit = "trainer.timeout_s"
    assert downloaded == ["org/policy", KEY, limit, "org/teacher", "trainer.teacher.model.path", limit]
    with pytest.raises(ValueError, match="'/models/a' is neither a folder"):
        engine_process._on_this_node(replace(settings, model_path="/models/a"))
