"""How trainers leave their devices by ending their processes, and what of them lies on the disk meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster import release
from skyrl_train.cluster.policy_group import PolicyGroup
from skyrl_train.cluster.release import OPTIMIZER, WEIGHTS, Exit, build_release, states_folder
from skyrl_train.config import load_config


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
        policy, exit_ = Policy(), Exit("/s")
        await exit_.leave(policy, WEIGHTS, OPTIMIZER)
        assert policy.calls == ["end"], "the model as it came needs no state"
        await exit_.leave(policy)
        await exit_.enter(policy, WEIGHTS)
        policy.calls.clear()
        policy.has_changed = True
        await exit_.leave(policy, OPTIMIZER)
        await exit_.leave(policy, WEIGHTS)
        assert policy.calls == ["save in /s", "drop optimizer", "end"]

    asyncio.run(body())


def test_a_process_whose_optimizer_was_dropped_is_replaced_before_it_trains():
    async def body() -> None:
        policy, exit_ = Policy(), Exit("/s")
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

    @staticmethod
    def remote(function: Any) -> Any:
        return function


def test_runs_that_share_a_state_path_remove_only_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release, "ray", OneNode)
    trainers = [
        load_config(
            [
                f"trainer.placement.state_path={tmp_path}/states",
                f"trainer.run_name={name}",
                "trainer.placement.release=exit",
            ]
        ).trainer
        for name in ("one", "two")
    ]
    folders = [Path(states_folder(trainer)) for trainer in trainers]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "rank_0.pt").write_text("state")

    asyncio.run(build_release(trainers[0]).close())
    assert not folders[0].exists() and (folders[1] / "rank_0.pt").exists()
    asyncio.run(build_release(trainers[1]).close())
    assert not (tmp_path / "states").exists()
