"""The service's command line: what it refuses, how it fails, and how it ends. Without processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import ray

from skyrl_train.entrypoints.main_service import main
from skyrl_train.service import TrainingService
from skyrl_train.service.queue import ServiceBroken
from skyrl_train.tracking.run_dir import write_record

prepared: list[object] = []


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model folder, a `trainer.prepare`, and the signal handlers as they were."""
    prepared.clear()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    module = ModuleType("makes_it")
    module.prepare = prepared.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "makes_it", module)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(*overrides: str) -> int:
    return main(
        ["trainer.policy.model.path=model", "data.train_data=[]", "trainer.prepare=makes_it:prepare", *overrides]
    )


def starting(monkeypatch: pytest.MonkeyPatch, start: Callable[..., object]) -> None:
    def started(config: object, name: str, *, outlives: bool) -> object:
        assert not outlives, "devices of a killed one would be held for ever"
        return start(config, name)

    monkeypatch.setattr(TrainingService, "start", staticmethod(started))


def test_a_configuration_that_cannot_work_is_refused_before_anything_is_prepared(capsys: pytest.CaptureFixture[str]):
    assert run("trainer.policy.optimizer_config.scheduler=linear") == 2
    assert not prepared and "scheduler is linear: it decays towards" in capsys.readouterr().out


def test_a_model_with_a_damaged_file_is_refused_before_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model/model.safetensors").write_bytes(b"torn")
    assert run() == 2
    assert "model.safetensors is not a complete safetensors file" in capsys.readouterr().out
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError("the disk is full"), 1, "error: OSError: the disk is full"),
        (KeyError("name"), 1, "error: KeyError: 'name'"),
        (ValueError("a service 'x' runs in this cluster"), 2, "error: a service 'x' runs in this cluster"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_start_that_fails_is_one_message(
    error: Exception, code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*arguments: object) -> None:
        raise error

    starting(monkeypatch, fail)
    assert run() == code and len(prepared) == 1
    out = capsys.readouterr()
    assert told in out.out and "Traceback" not in out.out + out.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_while_it_starts(number: int, code: int, monkeypatch: pytest.MonkeyPatch):
    def hang(*arguments: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(200)

    starting(monkeypatch, hang)
    started = time.monotonic()
    assert run() == code and time.monotonic() - started < 100


class Service(SimpleNamespace):
    """One that has ended, and how."""

    name, address = "trainer", "here"

    @property
    def broken(self) -> str | None:
        raise ServiceBroken("the service's process has ended")

    def stop(self) -> None:
        raise ServiceBroken("the service's process has ended")


@pytest.mark.parametrize(
    ("status", "code", "told"), [("finished", 0, "stopped by another program"), ("running", 1, "error: ")]
)
def test_one_that_another_program_stopped_has_not_failed(
    status: str,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    write_record(tmp_path, {"status": status})
    starting(monkeypatch, lambda *arguments: Service(run_dir=str(tmp_path)))
    assert run() == code and told in capsys.readouterr().out


def test_one_that_can_no_longer_train_is_ended_and_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stops: list[str] = []
    service = SimpleNamespace(
        name="trainer", address="here", run_dir="/runs/x", broken="no state", stop=lambda: stops.append("stop")
    )
    starting(monkeypatch, lambda *arguments: service)
    assert run() == 1 and stops == ["stop"]
    assert "error: the service can no longer train: no state" in capsys.readouterr().out


class Silent(SimpleNamespace):
    """One whose process is stopped."""

    name, address, run_dir = "trainer", "here", "/runs/x"

    @property
    def broken(self) -> None:
        if self.patience_s is None:
            os.kill(os.getpid(), self.number)
            time.sleep(200)
        time.sleep(self.patience_s)
        raise TimeoutError("the service's process did not answer")

    def stop(self) -> None:
        self.stops.append("stop")
        if self.hangs:
            os.kill(os.getpid(), self.number)
            time.sleep(200)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("hangs", "code"), [(False, 0), (True, 130)])
def test_a_signal_ends_one_that_does_not_answer_and_a_second_one_waits_for_nothing(
    number: int, hangs: bool, code: int, monkeypatch: pytest.MonkeyPatch
):
    service = Silent(number=number, hangs=hangs, stops=[], patience_s=None)
    starting(monkeypatch, lambda *arguments: service)
    started = time.monotonic()
    assert run() == code and time.monotonic() - started < 100 and service.stops == ["stop"]


def test_one_that_is_silent_for_too_long_is_ended_and_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    service = Silent(hangs=False, stops=[], patience_s=0.1)
    starting(monkeypatch, lambda *arguments: service)
    assert run("trainer.timeout_s=1", "generator.weight_sync_timeout_s=1") == 1 and service.stops == ["stop"]
    assert "process did not answer" in capsys.readouterr().out
