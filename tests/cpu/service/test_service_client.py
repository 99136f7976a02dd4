"""The handle of a service, without one."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from skyrl_train.config import load_config
from skyrl_train.service.actor import State
from skyrl_train.service.client import TrainingService, _environment, _place
from skyrl_train.service.queue import ServiceBroken

AGENT = Path(__file__).parents[3] / "examples/service/agent.py"
STATE = State("m", (), has_endpoint=True, policy_version=3, run_dir="/tmp")


class Actor:
    """Every method can be called; `answers` says what it returns or raises."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.called = answers, list[str]()

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> str:
            self.called.append(method)
            return method

        return SimpleNamespace(remote=remote)


def handle(monkeypatch: pytest.MonkeyPatch, at_end: ExitStack | None = None, **answers: Any) -> TrainingService:
    actor = Actor(**answers)

    def get(ref: str, timeout: float | None = None) -> Any:
        answer = answers[ref]
        assert timeout is not None or not isinstance(answer, GetTimeoutError), "it hangs"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda killed: actor.called.append("kill"))
    return TrainingService(actor, "x", "here", STATE, at_end or ExitStack())


@pytest.mark.parametrize("answer", [None, RayActorError()], ids=["lives", "has ended"])
def test_a_service_is_stopped_once(answer: Exception | None, monkeypatch: pytest.MonkeyPatch):
    """Ray has ended then, and would start a cluster of its own for a call."""
    at_end, ended = ExitStack(), list[str]()
    at_end.callback(ended.append, "Ray")
    service = handle(monkeypatch, at_end, close=answer)
    if answer is None:
        service.stop()
    else:
        with pytest.raises(ServiceBroken, match="process has ended"):
            service.stop()
    actor = service._handle
    service.stop()
    assert actor.called == ["close", "kill"] and ended == ["Ray"]
    with pytest.raises(ServiceBroken, match="the service was stopped by this program"):
        _ = service.policy_version
    assert actor.called == ["close", "kill"]


def test_engines_that_are_not_replaced_any_more_are_not_promised(monkeypatch: pytest.MonkeyPatch):
    service = handle(monkeypatch, state=STATE)
    assert service.broken is None
    with pytest.raises(ConnectionError, match="dead ones are being replaced"):
        _ = service.openai_base_urls
    broken = dataclasses.replace(STATE, broken="no engine is left")
    service = handle(monkeypatch, state=broken)
    assert service.broken == "no engine is left"
    with pytest.raises(ServiceBroken, match="no engine of the service is up.* can no longer train: no engine is left"):
        _ = service.openai_base_urls
    service = handle(monkeypatch, state=dataclasses.replace(broken, urls=("http://a",)))
    assert service.openai_base_urls == ("http://a/v1",), "it still serves"


def test_a_service_gets_the_variables_that_it_reads_if_they_are_set():
    config = load_config(["generator.remote_api_key_env=SERVER_KEY", "trainer.logger=[wandb]"])
    own = {"WANDB_API_KEY": "w", "SERVER_KEY": "s", "PATH": "p"}
    assert _environment(config, own) == {"WANDB_API_KEY": "w", "SERVER_KEY": "s"}
    assert _environment(config, {"PATH": "p"}) == {}, "engines are local"
    assert _environment(load_config(["trainer.logger=[console]"]), own) == {}


def test_a_service_that_does_not_answer_is_waited_for_so_long_and_can_be_ended(monkeypatch: pytest.MonkeyPatch):
    service = handle(monkeypatch, state=GetTimeoutError(), close=GetTimeoutError())
    with pytest.raises(TimeoutError, match="process did not respond within 30 s"):
        _ = service.broken
    with pytest.raises(ServiceBroken, match="did not respond within 60 s, and was killed"):
        service.stop()
    assert service._handle.called[-1] == "kill"


def test_a_model_is_not_saved_in_the_folder_of_the_program_by_mistake(monkeypatch: pytest.MonkeyPatch):
    service = handle(monkeypatch)
    with pytest.raises(ValueError, match=r"save\(''\): it must be a folder"):
        asyncio.run(service.save(""))
    assert not service._handle.called


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "usage: python agent.py NAME ADDRESS, which the service prints when it starts"),
        (
            ["agents", "127.0.0.1:9"],
            "error: no Ray cluster answers at '127.0.0.1:9'. Use the address that the service printed when it started",
        ),
    ],
    ids=["no arguments", "no cluster"],
)
def test_an_agent_without_a_service_ends_with_one_line(arguments: list[str], expected: str):
    command = [sys.executable, str(AGENT), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stderr.strip().splitlines()[-1:]) == (1, [expected])
    assert "Traceback" not in ended.stderr


def test_a_service_reads_the_cache_of_the_hub_of_the_program_that_starts_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "ab" * 28))
    monkeypatch.setattr("ray.remote", lambda actor: SimpleNamespace(options=lambda **options: options))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/cache")
    assert _place("a", False)["runtime_env"]["env_vars"]["HF_HUB_CACHE"] == "/cache"


def test_a_bucket_is_no_folder_to_save_in(monkeypatch: pytest.MonkeyPatch):
    service = handle(monkeypatch)
    with pytest.raises(ValueError, match="the folder to save is s3://bucket/model: only local or shared folders"):
        asyncio.run(service.save("s3://bucket/model"))
    assert not service._handle.called
