"""A real engine into whose parameters updates are copied, as on a GPU. vLLM's CPU layers keep packed copies of their
weights; here they do not.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import utils

from skyrl_train.engines.vllm.worker.copy_plan import CopyPlan
from skyrl_train.engines.vllm.worker.layerwise import LayerwiseReload
from skyrl_train.engines.vllm.worker.transfer import SyncExtension
from skyrl_train.weight_sync.bucket import TensorSpec
from skyrl_train.weight_sync.channels.shm import ShmSendChannel
from tests.support.live_engine import TIMEOUT_S, World, live_world, run
from tests.support.sending import specs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


begun: list[str] = []
"""Paths that updates took, in an engine's process."""


class Unpacked(SyncExtension):
    """A worker whose layers keep their weights as they are. vLLM imports this module before it loads the model."""

    def paths(self) -> list[str]:
        """Those of updates since the last call."""
        found = begun.copy()
        begun.clear()
        return found

    def hears_of_other_specs(self) -> None:
        """A sender connects that would send more, and then nothing: what was proven is void."""
        update: Any = self.weight_transfer_engine._update
        for specs in ([TensorSpec("new", torch.float32, (1,))], []):
            update.expect("another", specs)

    def serves_another_run(self) -> None:
        """Whose sender would send more, and ends."""
        self.weight_transfer_engine._update.expect("another", [TensorSpec("new", torch.float32, (1,))])
        self.weight_transfer_engine.shutdown()


def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def noting(kind: Any) -> Any:
    begin = kind.begin

    def noted(self: Any) -> None:
        begun.append(kind.__name__)
        begin(self)

    return noted


if multiprocessing.parent_process() is not None:
    utils.dispatch_cpu_unquantized_gemm = keep
    for one in (LayerwiseReload, CopyPlan):
        one.begin = noting(one)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    kwargs = {"block_size": 32, "worker_extension_cls": f"{__name__}.Unpacked"}
    yield from live_world(tmp_path_factory.mktemp("unpacked"), engine_init_kwargs=kwargs)


@pytest.fixture
def world(engine: World) -> World:
    """Nothing is proven."""
    for method in ("hears_of_other_specs", "paths"):
        asked(engine, method)
    return engine


def asked(world: World, method: str) -> Any:
    return run(world.engine._core.ask_workers(method, "asking"))[0]


def test_the_first_update_proves_the_copies_that_later_ones_use(world: World):
    """Each sync connects anew."""
    for which in (1, 0, 1):
        run(world.sync(world.weights(which), 70_000))
        assert run(world.answers()) == world.expected(which)
    assert asked(world, "paths") == ["LayerwiseReload", "CopyPlan", "CopyPlan"]


def test_a_first_update_that_fails_proves_nothing(world: World):
    with pytest.raises(Exception, match="3 layers of the engine did not get all their weights"):
        run(broken(world))
    for which in (0, 1):
        run(world.sync(world.weights(which)))
        assert run(world.answers()) == world.expected(which)
    assert asked(world, "paths") == ["LayerwiseReload"] * 2 + ["CopyPlan"]


def test_other_announcements_in_the_middle_of_an_update_void_its_proof(world: World):
    async def sync(which: int) -> None:
        named = world.weights(which)
        idle = await world.connect(ShmSendChannel(1, TIMEOUT_S), 1 << 20, "idle")  # else the engine closes the update
        report = await world.send(named, 1 << 20)
        idle.close()
        await world.engine._core.ask_workers("hears_of_other_specs", "asking")
        world.version += 1
        await world.engine.finish_weight_update(world.version, report.digests)
        await world.engine.resume()

    run(sync(1))
    assert run(world.answers()) == world.expected(1)
    for which in (0, 1):
        run(world.sync(world.weights(which)))
        assert run(world.answers()) == world.expected(which)
    assert asked(world, "paths") == ["LayerwiseReload"] * 2 + ["CopyPlan"]


async def broken(world: World) -> None:
    """An update from which the last tensors are missing, though the sender had announced them."""
    named = world.weights(1)
    sender = await world.connect(ShmSendChannel(1, TIMEOUT_S), 1 << 20, named_tensors=named)
    await world.engine.begin_weight_update()
    try:
        report = await asyncio.to_thread(sender.send, specs_of(named[:-3]), named[:-3])
    finally:
        sender.close()
    await world.engine.finish_weight_update(9, report.digests)


def test_what_the_sender_of_another_run_sent_is_forgotten(world: World):
    asked(world, "serves_another_run")
    for which in (0, 1):
        run(world.sync(world.weights(which)))
        assert run(world.answers()) == world.expected(which)
    assert asked(world, "paths") == ["LayerwiseReload", "CopyPlan"]


def test_two_senders_bring_one_plan(world: World):
    async def sync(which: int) -> None:
        named = world.weights(which)
        parts = {"one": named[: len(named) // 2], "two": named[len(named) // 2 :]}
        senders = {
            name: await world.connect(ShmSendChannel(1, TIMEOUT_S), 1 << 20, name, part) for name, part in parts.items()
        }
        await world.engine.begin_weight_update()
        digests = {}
        for name, sender in senders.items():
            report = await asyncio.to_thread(sender.send, specs_of(parts[name]), parts[name])
            digests |= report.digests
            sender.close()
        world.version += 1
        await world.engine.finish_weight_update(world.version, digests)
        await world.engine.resume()

    for which in (1, 0):
        run(sync(which))
        assert run(world.answers()) == world.expected(which)
    assert asked(world, "paths") == ["LayerwiseReload", "CopyPlan"]
