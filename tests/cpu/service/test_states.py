"""What is left of a service's states, and of nothing else, when it has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster import process
from skyrl_train.config import ConfigError, load_config
from skyrl_train.service.states import remove_states, states_folder


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
    trainer = load_config([*overrides]).trainer
    folder = Path(states_folder(trainer))
    for one in (folder / "a", folder / "b"):
        one.mkdir(parents=True)
        (one / "rank_0.pt").write_text("state")
        (one / "rank_1.tmp").write_text("half a state")
    return trainer, folder


def test_runs_that_share_a_state_path_remove_only_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "ray", OneNode)
    path = f"trainer.placement.state_path={tmp_path}/states"
    (one, its_folder), (two, other_folder) = (states(path, f"trainer.run_name={name}") for name in ("one", "sweep/1"))
    asyncio.run(remove_states(one))
    assert not its_folder.exists() and (other_folder / "a/rank_0.pt").exists()
    asyncio.run(remove_states(two))
    assert not (tmp_path / "states/sweep").exists()
    assert (tmp_path / "states").exists(), "a folder that the user has named stays"


def test_the_states_in_a_runs_own_folder_go_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "ray", OneNode)
    trainer, folder = states(f"trainer.run_dir={tmp_path}/run")
    assert folder.is_relative_to(tmp_path / "run")
    asyncio.run(remove_states(trainer))
    assert list((tmp_path / "run").iterdir()) == []


def test_nothing_but_states_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "ray", OneNode)
    trainer, folder = states(f"trainer.placement.state_path={tmp_path}")
    (folder / "thesis.tex").write_text("years")
    (folder / "b" / "thesis.pdf").write_text("years")
    asyncio.run(remove_states(trainer))
    assert sorted(str(one.relative_to(folder)) for one in folder.rglob("*")) == ["b", "b/thesis.pdf", "thesis.tex"]


@pytest.mark.parametrize("name", ["/tmp/victim", "..", ".", "a/../../b", "./a"])
def test_a_runs_name_leads_nowhere_but_into_its_folder(name: str):
    with pytest.raises(ConfigError, match="trainer.run_name is .*it must be a relative path such as my_run"):
        load_config([f"trainer.run_name={name}"])


def test_services_of_one_name_in_other_folders_have_other_states(tmp_path: Path):
    """Without the folder the rollback of one could restore the weights of the other."""
    path = f"trainer.placement.state_path={tmp_path}/states"
    one, two, again = (
        states_folder(load_config([path, f"trainer.run_dir={tmp_path}/{folder}"]).trainer) for folder in ("a", "b", "a")
    )
    assert one == again != two
