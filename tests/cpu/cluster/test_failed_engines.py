"""A dead or hanging engine: the sync fails in time, other engines continue, and a replacement starts. Through Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.batching.build import build_experience
from skyrl_train.batching.split import split
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config, load_config
from skyrl_train.trainer.agreement.sync_check import SyncCheck
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.from_config import micro_batch_limits, objective
from skyrl_train.types import Generation, Group, Prompt, SamplingParams
from tests.support.planted_deaths import EXTENSION, VARIABLE
from tests.support.samples import sample
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOOP = asyncio.new_event_loop()
SYNC_TIMEOUT_S = 15.0
GREEDY = SamplingParams(max_generate_length=12, temperature=0.0)
LONG = SamplingParams(max_generate_length=90, temperature=1.0)
PROMPTS = [[4 + (11 * n + k) % 50 for k in range(5 + n)] for n in range(8)]


def run(awaitable: Any, timeout_s: float = 300) -> Any:
    return LOOP.run_until_complete(asyncio.wait_for(awaitable, timeout_s))


def config_of(folder: Path) -> Config:
    return load_config(
        [
            f"trainer.policy.model.path={folder}",
            "data.train_data=[none.jsonl]",
            "trainer.bf16=false",
            "trainer.placement.policy_num_gpus_per_node=2",
            "trainer.placement.cpus_per_worker=0.1",
            "trainer.policy.megatron_config.tensor_model_parallel_size=2",
            "trainer.policy.optimizer_config.lr=1e-2",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.max_tokens_per_microbatch=128",
            "trainer.timeout_s=300",
            "generator.num_inference_engines=2",
            "generator.weight_sync_bucket_mb=1",
            f"generator.weight_sync_timeout_s={SYNC_TIMEOUT_S}",
            "generator.max_engine_restarts=9",
            "generator.kv_cache_memory_gb=0.0625",
            "generator.max_input_length=100",
            f"generator.engine_init_kwargs={{block_size: 32, worker_extension_cls: {EXTENSION}}}",
        ]
    )


class World:
    """A policy over two ranks that share every tensor, and two engines."""

    def __init__(self, config: Config, processes: Processes, order: Path) -> None:
        self.config, self.policy, self.engines, self.order = config, processes.policy, processes.engines, order
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(config.trainer.policy.model.path)
        self.rules = micro_batch_limits(config.trainer, model, processes.policy.dp_size)
        self.check = SyncCheck(1, "float32", self.rules, tensor_float=False, max_tokens=128)
        self.sync = processes.weight_sync
        self.sync.verify_with(self.check)
        self.groups = run(self._groups())

    async def answers(self, params: SamplingParams = GREEDY) -> list[Generation]:
        return await asyncio.gather(
            *(self.engines.generate(prompt, params, str(n)) for n, prompt in enumerate(PROMPTS))
        )

    async def _groups(self) -> list[Group]:
        answers = await self.answers()
        return [
            Group(Prompt(str(n), [], "none", {}, "none"), tuple(sample(PROMPTS[n], one, r) for r in (0.0, 1.0)))
            for n, one in enumerate(answers)
        ]

    async def train(self) -> None:
        experience = build_experience(self.groups, self.policy.policy_version)
        shards = Shards(split(experience, self.rules))
        credit = CreditAssignment(self.config.trainer.algorithm)(experience)
        await self.policy.update(shards, {"advantages": shards.put(credit.advantages, experience)})

    async def assert_all_serve_the_policy(self, num_engines: int) -> None:
        """Each engine computes the policy's logprobs, and requests are answered under its version."""
        assert len(self.engines.actors) == num_engines
        await self.check.compare(self.engines, await self.check.expect(self.policy, self.groups))
        assert {one.policy_version for one in await self.answers()} == {self.policy.policy_version}

    async def wait_for_replacements(self) -> None:
        tasks = [replica.replacement for replica in self.engines.replicas if replica.replacement is not None]
        await asyncio.wait_for(asyncio.gather(*tasks), 250)

    async def whole_again(self) -> None:
        """Both engines serve; the new one answers nobody before it has the weights."""
        await self.wait_for_replacements()
        for replica in self.engines.replicas:
            if not replica.is_up:
                answers = replica.actor.stream.options(num_returns="streaming").remote(
                    "generate_batch", [(0, PROMPTS[0], GREEDY)]
                )
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(answers), 1)
        await self.train()
        await self.sync.publish(self.groups)
        await self.assert_all_serve_the_policy(2)

    def core(self, index: int) -> psutil.Process:
        """The process of an engine's vLLM core."""
        started = self.engines.replicas[index].started
        assert started is not None
        children = [psutil.Process(pid) for pid, _ in started.pids[1:]]
        (core,) = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        return core


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("lost")
    config = config_of(write_tiny_model(folder / "model", num_hidden_layers=8))
    goal = objective(config.trainer.algorithm, config.generator.sampling_params, 1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv(VARIABLE, str(folder / "order"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
        with connect() as cluster:
            logs = str(folder / "logs")
            started = launch(config, cluster, max_model_len=128, objective=goal, num_optimizer_steps=10, logs=logs)
            processes = run(started)
            try:
                yield World(config, processes, folder / "order")
            finally:
                run(processes.stop())


@pytest.mark.parametrize("death", ["core", "stop"])
def test_a_sync_in_which_an_engine_is_lost_is_repeated_with_the_others(
    world: World, death: str, caplog: pytest.LogCaptureFixture
):
    before = {pid for replica in world.engines.replicas for pid, _ in replica.started.pids}  # type: ignore[union-attr]
    run(world.train())
    world.order.write_text(death)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        run(world.sync.publish(world.groups))
    seconds = time.monotonic() - started
    assert not world.order.exists(), "no engine was in the middle of a sync"
    assert seconds < (SYNC_TIMEOUT_S * 2 + 15 if death == "stop" else SYNC_TIMEOUT_S + 5)
    run(world.assert_all_serve_the_policy(1))
    (report,) = [record.getMessage() for record in caplog.records if "retrying" in record.getMessage()]
    assert "engine-" in report and "failed to send weights" in report

    run(world.whole_again())
    after = {pid for replica in world.engines.replicas for pid, _ in replica.started.pids}  # type: ignore[union-attr]
    assert not [pid for pid in before - after if psutil.pid_exists(pid)], "the lost engine still holds its device"


def test_requests_of_an_engine_that_dies_are_answered_by_the_others(world: World):
    async def main() -> None:
        requests = asyncio.create_task(world.answers(LONG))
        while sum(world.engines.router.loads) < len(PROMPTS):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        world.core(0).kill()
        answers = await requests
        assert {one.policy_version for one in answers} == {world.policy.policy_version}
        assert all(one.stop_reason in ("stop", "length") for one in answers)
        assert len(world.engines.actors) == 1
        await world.whole_again()

    run(main())


def test_requests_wait_for_a_new_engine_where_all_have_died(world: World):
    async def main() -> None:
        expected = [one.token_ids for one in await world.answers()]
        requests = asyncio.create_task(world.answers(LONG))
        while sum(world.engines.router.loads) < len(PROMPTS):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        world.core(0).kill()
        psutil.Process(world.engines.replicas[1].started.pids[0][0]).kill()  # type: ignore[union-attr]
        assert {one.policy_version for one in await requests} == {world.policy.policy_version}
        assert [one.token_ids for one in await world.answers()] == expected, "not the weights of that version"
        await world.whole_again()

    run(main())


def test_the_run_ends_with_one_error_when_no_engine_can_be_had(world: World):
    """The last test of the world: its engines are gone afterwards."""

    async def main() -> None:
        for replica in world.engines.replicas:
            replica.max_restarts = 0
        for index in (0, 1):
            world.core(index).send_signal(signal.SIGKILL)
        with pytest.raises(RemoteFailed, match="no engine is left .*engine-0 .*engine-1 .*core process died"):
            await world.answers(LONG)
        with pytest.raises(RemoteFailed, match="no engine is left"):
            await world.sync.publish(world.groups)

    run(main())
