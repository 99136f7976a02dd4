"""Kinds of engines: the built-in ones, and one that a user brings from a file outside the package."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from skyrl_train.checks.engines import engine_problems
from skyrl_train.cluster.pool.engine_process import EngineProcess
from skyrl_train.cluster.process import AsyncHost
from skyrl_train.config import load_config
from skyrl_train.engines.protocol import ENGINES, Engine, engine_kind
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.settings import changed, engine_settings

METHODS = [name for name in vars(Engine) if not name.startswith("_")]
PARROT = '''\
from skyrl_train.engines.protocol import Engine, EngineFacts
from skyrl_train.types import Generation


class Parrot:
    """Answers each prompt with itself."""

    prepared, story = [], []

    @staticmethod
    def prepare(settings):
        Parrot.prepared.append(settings.model_path)

    def __init__(self, settings):
        self.version = settings.generator.engine_init_kwargs["first_version"]

    async def start(self, *, waits_for_weights):
        return EngineFacts(num_workers=3)

    async def generate_batch(self, requests):
        for index, token_ids, params in requests:
            tokens = token_ids[: params.max_generate_length]
            yield [(index, Generation(tokens, [0.0] * len(tokens), "", "stop", policy_version=self.version))]

    async def begin_weight_update(self):
        self.story.append("begin")
        if self.story[:-1] == ["refuse"]:
            raise RuntimeError("the engine is not awake")

    async def update_weights(self, message):
        self.story.append(message["sender"])

    async def finish_weight_update(self, policy_version, sent_digests):
        self.story.append("finish")
        self.version = policy_version

    async def resume(self):
        self.story.append("resume")

    async def nothing(self, *args, **kwargs):
        """The rest of the protocol."""

    ping = prompt_logprobs = pause = sleep = wake_weights = wake_kv_cache = memory = shutdown = nothing
    init_weight_sync = nothing


class Lame:
    def start(self):
        """All that it can."""


class Heir(Engine):
    async def ping(self):
        """All that it does not inherit."""
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_engines.py").write_text(PARROT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ENGINES)
def test_the_built_in_engines_have_the_whole_protocol(name: str):
    engine = resolve_name(ENGINES[name].engine)
    for method in METHODS:
        wanted = list(inspect.signature(getattr(Engine, method)).parameters)
        assert list(inspect.signature(getattr(engine, method)).parameters) == wanted, method


def test_an_engine_from_outside_the_package_is_built_asked_and_updated(own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.cluster.pool.engine_process.host", lambda: "10.0.0.1")
    monkeypatch.setattr("ray.get_runtime_context", lambda: type("Context", (), {"get_node_id": lambda self: "node"})())
    settings = changed(
        engine_settings(str(own), "parrot", "float32", 64, engine_init_kwargs={"first_version": 2}),
        backend="my_engines:Parrot",
    )
    (own / "engine-0.log").touch()
    host = AsyncHost.__new__(AsyncHost)  # no Ray actor, whose log it would redirect
    host._object = EngineProcess(str(own / "engine-0.log"))

    async def main() -> list[Any]:
        await host.call("prepare", settings)
        started = await host.call("start", settings)
        assert started.facts.num_workers == 3 and resolve_name("my_engines:Parrot").prepared == [str(own)]
        await host.call("begin_weight_update")
        await host.call("update_weights", {"sender": "policy-0"})
        await host.call("finish_and_resume", 7, {})
        requests = [(5, [1, 2, 3], SamplingParams(max_generate_length=2))]
        return [item async for item in host.stream("generate_batch", requests)]

    assert asyncio.run(main()) == [[(5, Generation([1, 2], [0.0, 0.0], "", "stop", policy_version=7))]]


def test_errors_of_calls_leave_their_traceback_in_the_process(capfd: pytest.CaptureFixture[str]):
    """The driver's message names its log."""

    class Fails:
        async def load(self) -> None:
            raise ValueError("no such file")

        async def generate(self) -> Any:
            yield 1
            raise ValueError("no such token")

    host = AsyncHost.__new__(AsyncHost)
    host._object = Fails()

    async def main() -> None:
        with pytest.raises(ValueError, match="file"):
            await host.call("load")
        with pytest.raises(ValueError, match="token"):
            assert [item async for item in host.stream("generate")] == []

    asyncio.run(main())
    printed = capfd.readouterr().err
    assert "in load\n" in printed and "in generate\n" in printed
    assert printed.strip().endswith("ValueError: no such token")


@pytest.mark.parametrize("order", ["early", "late", "refused"])
def test_an_engine_gets_weights_when_its_update_has_begun(own: Path, order: str):
    """A sender may call before the driver has, also for the update after one that ended."""
    parrot = resolve_name("my_engines:Parrot")
    process = EngineProcess("engine-0.log")
    process._engine = parrot(engine_settings("m", "p", "float32", 64, engine_init_kwargs={"first_version": 0}))

    async def main() -> None:
        for _ in range(2):
            parrot.story[:] = ["refuse"] if order == "refused" else []
            if order == "late":
                await process.begin_weight_update()
            sent = asyncio.ensure_future(process.update_weights({"sender": "policy-0"}))
            await asyncio.sleep(0.01)
            assert sent.done() is (order == "late")
            if order == "refused":
                with pytest.raises(RuntimeError, match="not awake"):
                    await process.begin_weight_update()
                with pytest.raises(WeightSyncError, match="could not begin: the engine is not awake"):
                    await sent
                return
            if order == "early":
                await process.begin_weight_update()
            await sent
            await process.finish_and_resume(1, {})
            assert parrot.story == ["begin", "policy-0", "finish", "resume"]

    asyncio.run(main())


def test_a_sender_that_was_replaced_before_the_update_began_takes_no_weights(own: Path):
    """The sync failed because of another engine, while this one was still pausing."""
    process = EngineProcess("engine-0.log")
    parrot = resolve_name("my_engines:Parrot")
    process._engine = parrot(engine_settings("m", "p", "float32", 64, engine_init_kwargs={"first_version": 0}))
    parrot.story.clear()

    async def main() -> None:
        late = asyncio.ensure_future(process.update_weights({"sender": "closed"}))
        await asyncio.sleep(0)
        await process.init_weight_sync({})
        await process.begin_weight_update()
        await process.update_weights({"sender": "open"})
        with pytest.raises(WeightSyncError, match="another sender has connected"):
            await late
        assert parrot.story == ["begin", "open"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("lmdeploy", r"backend is lmdeploy: it must be vllm, or `module:Class` of your own engine"),
        ("nowhere:Engine", "is 'nowhere:Engine', and nowhere cannot be imported .*No module named 'nowhere'"),
        ("my_engines:Robin", "is 'my_engines:Robin', and my_engines .* has no Robin"),
        ("my_engines:Heir", "the class has no start, generate_batch, .*, shutdown. See"),
        ("my_engines:Lame", "the class has no ping, generate_batch, .*, shutdown. See skyrl_train/engines/protocol.py"),
    ],
)
def test_an_engine_that_cannot_be_one_is_refused_before_anything_starts(own: Path, backend: str, problem: str):
    (found,) = engine_problems(load_config([f"generator.backend={backend}"]))
    with pytest.raises(ValueError, match=problem):
        raise ValueError(found)


def test_an_own_engine_and_running_servers_exclude_each_other(own: Path):
    config = load_config(["generator.backend=my_engines:Parrot", "generator.run_engines_locally=false"])
    assert list(engine_problems(config)) == [
        "generator.backend is my_engines:Parrot: with generator.run_engines_locally=false it must be vllm"
    ]


def test_an_own_engine_takes_what_arguments_it_likes(own: Path):
    config = load_config(["generator.backend=my_engines:Parrot", "generator.engine_init_kwargs.seed=3"])
    assert list(engine_problems(config)) == [] and engine_kind(config.generator).engine == "my_engines:Parrot"
    (problem,) = engine_problems(load_config(["generator.engine_init_kwargs.seed=3"]))
    assert "Remove it and set trainer.seed" in problem
