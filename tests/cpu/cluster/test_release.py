"""How trainers leave their devices by ending their processes, and what of them is on the disk in the meantime."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster import process
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.release import Exit, build_release, states_folder
from skyrl_train.config import ConfigError, load_config
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, SavedState


class Policy(PolicyGroup):
    """Without processes: notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.runs, self.has_changed = True, False

    @property
    def is_running(self) -> bool:
        return self.runs

    async def save_state(self, folder: str) -> list[Any]:
        self.calls.append(f"save in {folder}")
        self.has_changed = False
        return []

    async def drop(self, *parts: str) -> None:
        self.calls.append(f"drop {parts[0]}")

    async def end(self) -> None:
        assert not self.has_changed, "an update is lost"
        self.calls.append("end")
        self.runs = False

    async def restart(self) -> list[Any]:
        self.calls.append("restart")
        self.runs = True
        return []


def test_the_state_is_written_once_per_update_and_before_anything_is_dropped():
    async def body() -> None:
        policy, exit_ = Policy(), Exit(load_config(["trainer.placement.state_path=/s", "trainer.run_name=one"]).trainer)
        await exit_.leave(policy, WEIGHTS, OPTIMIZER)
        assert policy.calls == ["end"], "the model as it came needs no state"
        await exit_.leave(policy)
        await exit_.enter(policy, WEIGHTS)
        policy.calls.clear()
        policy.has_changed = True
        await exit_.leave(policy, OPTIMIZER)
        await exit_.leave(policy, WEIGHTS)
        assert policy.calls == ["save in /s/one", "drop optimizer", "end"]

    asyncio.run(body())


def test_a_resumed_group_does_not_need_its_checkpoint_a_second_time():
    async def body() -> None:
        group = StartedPolicy(Processes())  # type: ignore[arg-type]
        await group.start({}, SavedState("/checkpoints/global_step_4", 4))
        exit_ = Exit(load_config(["trainer.placement.state_path=/s", "trainer.run_name=one"]).trainer)
        await exit_.leave(group)
        await exit_.enter(group, WEIGHTS)
        loads = [call for call in group.group.calls if call[0] == "load_state"]  # type: ignore[attr-defined]
        assert loads == [("load_state", "/checkpoints/global_step_4", 4), ("load_state", "/s/one", 4)]

    asyncio.run(body())


class Processes:
    """Notes what a group asks of its processes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.actors = [0]

    async def build(self, *arguments: Any) -> list[Any]:
        return []

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append((method, *arguments))
        return []

    def spawn(self) -> None:
        self.actors = [0]

    async def end(self) -> None:
        self.actors = []


class StartedPolicy(ModelGroup):
    entry_point = ""


def test_a_process_whose_optimizer_was_dropped_is_replaced_before_it_trains():
    async def body() -> None:
        policy, exit_ = Policy(), Exit(load_config(["trainer.placement.state_path=/s", "trainer.run_name=one"]).trainer)
        policy.has_changed = True
        await exit_.leave(policy, OPTIMIZER)
        policy.calls.clear()
        await exit_.enter(policy, WEIGHTS)
        assert policy.calls == [], "its weights are there"
        await exit_.enter(policy, OPTIMIZER)
        assert policy.calls == ["end", "restart"]
        await exit_.enter(policy, WEIGHTS, OPTIMIZER)
        assert policy.calls == ["end", "restart"]

    asyncio.run(body())


class OneNode:
    """Ray's view of a cluster of this computer alone."""

    @staticmethod
    def get_runtime_context() -> Any:
        return OneNode

    @staticmethod
    def get_node_id() -> str:
        return "here"

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        return [{"NodeID": "here", "Alive": True}, {"NodeID": "lost", "Alive": False}]


def states(*overrides: str) -> tuple[Any, Path]:
    """The trainer's configuration, and the folder of its states as a rank has written it."""
    trainer = load_config(["trainer.placement.release=exit", *overrides]).trainer
    folder = Path(states_folder(trainer))
    for one in (folder, folder / "a", folder / "b"):
        one.mkdir(parents=True)
        (one / "rank_0.pt").write_text("state")
        (one / "rank_1.tmp").write_text("half a state")
    return trainer, folder


def test_runs_that_share_a_state_path_remove_only_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "ray", OneNode)
    path = f"trainer.placement.state_path={tmp_path}/states"
    (one, its_folder), (two, other_folder) = (states(path, f"trainer.run_name={name}") for name in ("one", "sweep/1"))
    asyncio.run(build_release(one).close())
    assert not its_folder.exists() and (other_folder / "rank_0.pt").exists()
    asyncio.run(build_release(two).close())
    assert not (tmp_path / "states/sweep").exists()
    assert (tmp_path / "states").exists(), "a folder that the user has named stays"


def test_the_states_in_a_runs_own_folder_go_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "ray", OneNode)
    trainer, folder = states(f"trainer.run_dir={tmp_path}/run")
    assert folder.is_relative_to(tmp_path / "run")
    asyncio.run(build_release(trainer).close())
    assert list((tmp_path / "run").iterdir()) == []


def test_nothing_but_states_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "ray", OneNode)
    trainer, folder = states(f"trainer.placement.state_path={tmp_path}")
    (folder / "thesis.tex").write_text("years")
    (folder / "b" / "thesis.pdf").write_text("years")
    asyncio.run(build_release(trainer).close())
    assert sorted(str(one.relative_to(folder)) for one in folder.rglob("*")) == ["b", "b/thesis.pdf", "thesis.tex"]


@pytest.mark.parametrize("name", ["/tmp/victim", "..", ".", "a/../../b", "./a"])
def test_a_runs_name_leads_nowhere_but_into_its_folder(name: str):
    with pytest.raises(ConfigError, match="trainer.run_name is .*it must be a relative path such as my_run"):
        load_config([f"trainer.run_name={name}"])
