"""Training import shutil
from a script or a notebook. A whole run is in jobs/test_custom_run.py."""

from __future__ import annotations

import _thread
import asyncio
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import skyrl_train
from skyrl_train import Experiment
from skyrl_train.config import ConfigError, main_config
from tests.support.jobs import write_world


@pytest.fixture(scope="module")
def made_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("api") / "world")


@pytest.fixture
def world(made_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made_world)
    monkeypatch.syspath_prepend(str(made_world))
    return made_world


class NoTraining:
    """An experiment that starts no process: its run does what a test wants."""

    num_train_rows = 32
    is_done = False
    loop = None
    ended: threading.Event

    def __init__(self, config: Any, console: Any) -> None:
        type(self).made, self.config = self, config

    def find_checkpoint(self) -> bool:
        return False

    async def run(self, run_dir: Any) -> None:
        self.thread = threading.current_thread()

    def request_stop(self) -> bool:
        self.stop.set()
        return True


class Waits(NoTraining):
    """Interrupts the main thread, and runs until it is stopped."""

    async def run(self, run_dir: Any) -> None:
        self.stop = asyncio.Event()
        _thread.interrupt_main(signal.SIGINT)
        await asyncio.wait_for(self.stop.wait(), 20)


class Fails(NoTraining):
    async def run(self, run_dir: Any) -> None:
        raise RuntimeError("rank 1 died")


def in_a_notebook(config: Any, experiment: Any) -> Path:
    """A cell runs while the kernel's event loop does, which leaves SIGINT to Python (asyncio.run would not)."""

    async def cell() -> Path:
        return skyrl_train.run(config, experiment=experiment)

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def test_a_configuration_is_that_of_the_command_line_with_values_of_ones_own(world: Path):
    overrides = ["trainer.seed=7", "extra.judge.name=strict", "extra.weights=[1, 2]"]
    config = skyrl_train.load_config(overrides, experiment="tiny")
    assert config == main_config(["+experiment=tiny", *overrides])
    assert config.extra == {"judge": {"name": "strict"}, "weights": [1, 2]}


def test_a_configuration_that_cannot_work_is_one_error_with_all_problems(world: Path):
    config = skyrl_train.load_config(["generator.rollout=no_such:f", "trainer.train_batch_size=99"], experiment="tiny")
    with pytest.raises(skyrl_train.ConfigError) as caught:
        skyrl_train.run(config)
    assert any("no_such cannot be imported" in problem for problem in caught.value.problems)
    assert any("train_batch_size is 99" in problem for problem in caught.value.problems)


def test_a_run_has_a_thread_of_its_own_only_where_an_event_loop_runs(world: Path):
    config = skyrl_train.load_config(["trainer.run_name=plain"], experiment="tiny")
    folder = skyrl_train.run(config, experiment=NoTraining)  # type: ignore[arg-type]
    assert folder == world / "runs/plain" and (folder / "config.yaml").exists()
    assert NoTraining.made.thread is threading.main_thread()
    config = skyrl_train.load_config(["trainer.run_name=notebook"], experiment="tiny")
    assert in_a_notebook(config, NoTraining) == world / "runs/notebook"
    assert NoTraining.made.thread is not threading.main_thread()


@pytest.mark.parametrize("is_notebook", [False, True])
def test_an_interrupt_ends_the_run_after_its_step(world: Path, is_notebook: bool, capsys: pytest.CaptureFixture[str]):
    config = skyrl_train.load_config([f"trainer.run_name=stop_{is_notebook}"], experiment="tiny")
    with pytest.raises(KeyboardInterrupt):
        if is_notebook:
            in_a_notebook(config, Waits)
        else:
            skyrl_train.run(config, experiment=Waits)  # type: ignore[arg-type]
    assert Waits.made.stop.is_set() and "stopping after this step" in capsys.readouterr().out


def test_a_failed_run_raises_its_error(world: Path):
    config = skyrl_train.load_config(["trainer.run_name=fails"], experiment="tiny")
    with pytest.raises(RuntimeError, match="rank 1 died"):
        skyrl_train.run(config, experiment=Fails)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "key"),
    [("imported", "custom_modules=[own_imported]"), ("named", "algorithm.policy_loss_type=own_named:loss")],
)
def test_a_module_that_is_edited_between_two_runs_of_a_notebook_is_refused(world: Path, name: str, key: str):
    code = "from skyrl_train.algorithms.losses.ppo import regular as loss\n"
    (file := world / f"own_{name}.py").write_text(code)
    keys = [f"trainer.run_name=edited_{name}", f"trainer.{key}"]
    config = skyrl_train.load_config(keys, experiment="tiny")
    for _ in range(2):
        skyrl_train.run(config, experiment=NoTraining)  # type: ignore[arg-type]
    file.write_text(code + "# edited\n")
    with pytest.raises(skyrl_train.ConfigError, match=rf"own_{name} \(.*\) was edited after .* Restart the kernel"):
        skyrl_train.run(config, experiment=NoTraining)  # type: ignore[arg-type]


def test_a_notebook_can_await_a_run_and_do_other_work(world: Path):
    config = skyrl_train.load_config(["trainer.run_name=awaited"], experiment="tiny")

    async def cell() -> tuple[Path, int]:
        ticks = 0
        training = asyncio.ensure_future(skyrl_train.run_async(config, experiment=NoTraining))  # type: ignore[arg-type]
        while not training.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return await training, ticks

    folder, ticks = asyncio.run(cell())
    assert folder == world / "runs/awaited" and ticks > 1
    assert NoTraining.made.thread is not threading.main_thread()


class Endless(NoTraining):
    """Runs until it is stopped."""

    async def run(self, run_dir: Any) -> None:
        self.stop = asyncio.Event()
        await asyncio.wait_for(self.stop.wait(), 20)


def test_a_cancelled_run_ends_after_its_step(world: Path, capsys: pytest.CaptureFixture[str]):
    config = skyrl_train.load_config(["trainer.run_name=cancelled"], experiment="tiny")

    async def cell() -> None:
        training = asyncio.ensure_future(skyrl_train.run_async(config, experiment=Endless))  # type: ignore[arg-type]
        while not hasattr(getattr(Endless, "made", None), "stop"):
            await asyncio.sleep(0.001)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    asyncio.run(cell())
    assert Endless.made.stop.is_set() and "stopping after this step" in capsys.readouterr().out


def test_a_second_run_at_a_time_is_refused_before_it_starts_and_may_follow(world: Path):
    config = skyrl_train.load_config(["trainer.run_name=second"], experiment="tiny")

    class First(Endless):
        made: Any = None

    async def cell() -> Path:
        first = asyncio.ensure_future(skyrl_train.run_async(config, experiment=First))  # type: ignore[arg-type]
        while not hasattr(First.made, "stop"):
            await asyncio.sleep(0.001)
        with pytest.raises(ConfigError, match=r"run_name is second: another run of this process has not ended"):
            await skyrl_train.run_async(config, experiment=NoTraining)  # type: ignore[arg-type]
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await skyrl_train.run_async(config, experiment=NoTraining)  # type: ignore[arg-type]

    assert asyncio.run(cell()) == world / "runs/second"


def test_a_function_that_prepares_a_run_may_train_by_itself(world: Path, monkeypatch: pytest.MonkeyPatch):
    config = skyrl_train.load_config(["trainer.run_name=warm"], experiment="tiny")
    prepared: list[Path] = []

    def prepare(*_: Any) -> None:
        monkeypatch.setattr("skyrl_train.api.command.prepare", lambda *_: None)
        prepared.append(skyrl_train.run(config, experiment=NoTraining))  # type: ignore[arg-type]

    monkeypatch.setattr("skyrl_train.api.command.prepare", prepare)
    assert skyrl_train.run(config, experiment=NoTraining) == prepared[0]  # type: ignore[arg-type]


def test_a_start_that_fails_gives_the_folder_back_to_the_run_that_was_there(
    world: Path, capsys: pytest.CaptureFixture[str]
):
    config = skyrl_train.load_config(["trainer.run_name=kept"], experiment="tiny")
    skyrl_train.run(config, experiment=NoTraining)  # type: ignore[arg-type]
    (world / "runs/kept/mine").touch()
    shutil.copytree(world / "runs/kept", world / "runs/kept.failed")  # a run that somebody keeps under this name
    (world / "runs/kept.failed/run.json").write_text('{"status": "failed"}')
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 died"):
            skyrl_train.run(config, experiment=Fails)  # type: ignore[arg-type]
        assert (world / "runs/kept/mine").exists() and not (world / "runs/kept.1").exists()
        assert f"Full traceback: {world}/runs/kept.failed.1/logs/driver.log" in capsys.readouterr().out
        assert "rank 1 died" in (world / "runs/kept.failed.1/logs/driver.log").read_text()
    assert (world / "runs/kept.failed/mine").exists() and not (world / "runs/kept.failed.2").exists()
    skyrl_train.run(config, experiment=NoTraining)  # type: ignore[arg-type]
    assert (world / "runs/kept.1/mine").exists(), "a run that succeeds takes the name"


def test_importing_the_package_is_quick_and_its_names_are_imported_when_used():
    code = "import sys, skyrl_train; assert not {'torch', 'ray', 'vllm'} & sys.modules.keys(); skyrl_train.run; "
    code += "import skyrl_train.entrypoints.run; assert callable(skyrl_train.run) and callable(skyrl_train.load_config)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        _ = skyrl_train.train


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"overrides": "trainer.seed=2"}, r"load_config\(overrides='trainer.seed=2'\): it must be a list"),
        ({"overrides": {"trainer.seed": 2}}, "it must be a list"),
        ({"overrides": [("trainer.seed", 3)]}, "entry 0 is of type tuple. Write text, as .*trainer.seed=2"),
        ({"overrides": ["--config-file", "x.yaml"]}, r"'--config-file' is an option, .*config.main_config\("),
        ({"folders": "configs"}, r"load_config\(folders='configs'\): it must be a list"),
        ({"folders": ["no/such"]}, "there is no folder no/such"),
    ],
)
def test_arguments_that_are_no_lists_of_overrides_or_folders_are_named(arguments: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected):
        skyrl_train.load_config(**arguments)


class Misspelt(Experiment):
    def get_rollut(self) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("config", "experiment", "expected"),
    [
        ("quickstart", Experiment, r"run\('quickstart'\): it must be a configuration"),
        (None, dict, r"run\(experiment=<class 'dict'>\): it must be a subclass"),
        (None, Misspelt, "Misspelt.get_rollut overrides nothing: did you mean get_rollout?"),
    ],
)
def test_what_cannot_be_run_is_named(config: Any, experiment: Any, expected: str):
    with pytest.raises(ConfigError, match=expected):
        skyrl_train.run(config or skyrl_train.load_config(), experiment=experiment)
