"""A policy in two stages and two engines, through Ray: a synced engine answers as the export does; a sync that went
wrong ends before an answer; an engine that dies or hangs costs neither a sync nor a request, and is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoConfig

from skyrl_train.batching.build import build_experience
from skyrl_train.batching.split import split
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config, load_config
from skyrl_train.trainer.agreement.sync_check import SyncCheck
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.from_config import micro_batch_limits, objective
from skyrl_train.types import Generation, Group, Prompt, SamplingParams
from tests.support import planted_faults
from tests.support.live_engine import greedy, load_model
from tests.support.planted_deaths import EXTENSION, VARIABLE
from tests.support.samples import sample
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOOP = asyncio.new_event_loop()
MAX_LEN = 128
SYNC_TIMEOUT_S = 15.0
GREEDY = SamplingParams(max_generate_length=12, temperature=0.0)
SAMPLED = SamplingParams(max_generate_length=12, temperature=1.0)
LONG = SamplingParams(max_generate_length=50, temperature=1.0)
# The first is longer than two blocks of the engine's cache, so that its prefix is kept.
PROMPTS = [[4 + (11 * n + k) % 50 for k in range(70 if n == 0 else 5 + n)] for n in range(8)]


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
            "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
            "trainer.policy.optimizer_config.lr=1e-2",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.train_batch_size=8",
            "trainer.policy_mini_batch_size=8",
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


def groups_of(first: list[Generation], second: list[Generation]) -> list[Group]:
    """Two answers to each prompt, of different rewards, so that the update is not zero."""
    return [
        Group(Prompt(str(n), [], "none", {}, "none"), (sample(PROMPTS[n], one, 0.0), sample(PROMPTS[n], other, 1.0)))
        for n, (one, other) in enumerate(zip(first, second, strict=True))
    ]


class World:
    """A policy in two stages and two engines, running."""

    def __init__(self, config: Config, processes: Processes, folder: Path) -> None:
        self.config, self.folder, self.order = config, folder, folder / "order"
        self.policy, self.engines, self.weight_sync = processes.policy, processes.engines, processes.weight_sync
        model = AutoConfig.from_pretrained(config.trainer.policy.model.path)
        self.rules = micro_batch_limits(config.trainer, model, self.policy.dp_size)
        self.check = SyncCheck(1, "float32", self.rules, tensor_float=False, max_tokens=MAX_LEN)
        self.weight_sync.check = self.check

    async def answers(self, params: SamplingParams = GREEDY) -> list[Generation]:
        return await asyncio.gather(
            *(self.engines.generate(prompt, params, str(n)) for n, prompt in enumerate(PROMPTS))
        )

    async def groups(self) -> list[Group]:
        return groups_of(await self.answers(SAMPLED), await self.answers(SAMPLED))

    async def update(self, groups: list[Group]) -> dict[str, float]:
        experience = build_experience(groups, self.policy.policy_version)
        shards = Shards(split(experience, self.rules))
        credit = CreditAssignment(self.config.trainer.algorithm)(experience)
        metrics, _ = await self.policy.update(shards, {"advantages": shards.put(credit.advantages, experience)})
        return metrics

    async def train(self) -> list[Group]:
        """Returns: the groups that were trained."""
        groups = await self.groups()
        await self.update(groups)
        return groups

    async def sync(self) -> None:
        await self.weight_sync.send_once()

    async def export(self) -> Path:
        target = self.folder / f"version_{self.policy.policy_version}"
        await self.policy.save_hf(str(target))
        return target

    async def assert_all_serve_the_policy(self, groups: list[Group], num_engines: int) -> None:
        """Each engine computes the policy's logprobs, and requests are answered under its version."""
        assert len(self.engines.actors) == num_engines
        await self.check.compare(self.engines, await self.check.expect(self.policy, groups))
        assert {one.policy_version for one in await self.answers()} == {self.policy.policy_version}

    async def whole_again(self) -> None:
        """Both engines serve; the new one answers nobody before it has the weights."""
        tasks = [replica.replacement for replica in self.engines.replicas if replica.replacement is not None]
        await asyncio.wait_for(asyncio.gather(*tasks), 250)
        for replica in self.engines.replicas:
            if not replica.is_up:
                answers = replica.actor.stream.options(num_returns="streaming").remote(
                    "generate_batch", [(0, PROMPTS[0], GREEDY)]
                )
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(answers), 1)
        groups = await self.train()
        await self.weight_sync.publish(groups)
        await self.assert_all_serve_the_policy(groups, 2)

    @property
    def pids(self) -> set[int]:
        return {pid for replica in self.engines.replicas for pid, _ in replica.started.pids}  # type: ignore[union-attr]

    def core(self, index: int) -> psutil.Process:
        """The process of an engine's vLLM core."""
        started = self.engines.replicas[index].started
        assert started is not None
        children = [psutil.Process(pid) for pid, _ in started.pids[1:]]
        (core,) = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        return core


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("sync")
    config = config_of(write_tiny_model(folder / "model", num_hidden_layers=8))

    async def start(self: PolicyGroup, kwargs: dict[str, Any], saved: None) -> None:
        self.ranks = await self.group.build("tests.support.planted_faults:FaultyPolicy", kwargs)

    goal = objective(config.trainer.algorithm, config.generator.sampling_params)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv(VARIABLE, str(folder / "order"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(PolicyGroup, "start", start)
        with connect() as cluster:
            logs = str(folder / "logs")
            started = launch(config, cluster, max_model_len=MAX_LEN, objective=goal, num_optimizer_steps=50, logs=logs)
            processes = run(started)
            try:
                yield World(config, processes, folder)
            finally:
                run(processes.stop())


def test_engine_and_policy_agree_before_an_update_and_the_update_moves_the_policy(world: World):
    run(world.sync())
    groups = run(world.groups())
    before = run(world.update(groups))
    assert 0 < before["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    stale = run(world.update(groups))
    assert stale["policy/rollout_train_logprobs_abs_diff_mean"] > 1e-3, "the engine's weights are two updates old"


def test_a_synced_engine_answers_as_hugging_faces_model_of_the_export(world: World):
    """That it equals a fresh engine bit for bit is in tests/cpu/weight_sync/test_sync_proof.py."""
    for _ in range(2):  # tasks and buffers of the first sync must not leak into the second
        run(world.train())
        run(world.sync())
    model = load_model(run(world.export()))
    for prompt, answer in zip(PROMPTS, run(world.answers()), strict=True):
        tokens, logprobs = greedy(model, prompt, GREEDY.max_generate_length)
        assert answer.token_ids == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert answer.policy_version == world.policy.policy_version


def logprobs_of(answers: list[Generation]) -> list[Any]:
    """To compare: which engine answers a request may change the rounding."""
    return [pytest.approx(one.logprobs, abs=1e-5) for one in answers]


def test_a_repeated_prompt_is_computed_again_after_a_sync(world: World):
    """Also its prefix, which the engine keeps: with old keys and values its logprobs would not be the policy's."""
    run(world.sync())
    before = run(world.answers())
    assert [one.logprobs for one in run(world.answers())] == logprobs_of(before)
    run(world.train())
    run(world.sync())
    after = run(world.answers())
    assert all(one.logprobs != other.logprobs for one, other in zip(before, after, strict=True))
    asked = [PROMPTS[n] + generation.token_ids for n, generation in enumerate(after)]
    scored_by = run(world.engines.prompt_logprobs(asked))
    assert len(scored_by) == 2
    for scored in scored_by.values():
        for n, generation in enumerate(after):
            assert generation.logprobs == pytest.approx(scored[n][len(PROMPTS[n]) :], abs=1e-4)
    metrics = run(world.update(run(world.groups())))
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5


def test_a_sync_of_unchanged_weights_changes_no_answer(world: World):
    run(world.sync())
    before = run(world.answers())
    run(world.sync())
    after = run(world.answers())
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert [one.logprobs for one in after] == logprobs_of(before)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (planted_faults.TASKS, "does not yield the current weights"),
        (planted_faults.TENSOR, f"the export of 1 of .*: {planted_faults.STALE}"),
        (planted_faults.SWAP, "the export of 2 of .*o_proj.weight, .*o_proj.weight"),
        (planted_faults.LOST, "received bucket 2, expected 1: a bucket was lost"),
        (planted_faults.BYTES, "1 arrived with other bytes: model.embed_tokens.weight"),
    ],
)
def test_an_injected_fault_stops_the_sync_before_an_answer_is_sampled(world: World, fault: str, message: str):
    run(world.sync())
    run(world.policy.group.all("remember"))
    run(world.train())
    run(world.policy.group.all("plant", fault))
    with pytest.raises(RemoteFailed, match=message):
        run(world.sync())
    with pytest.raises(RemoteFailed, match="the last weight update did not complete"):
        run(world.engines.resume())
    held = asyncio.ensure_future(world.answers(), loop=LOOP)
    LOOP.run_until_complete(asyncio.sleep(1))
    assert not held.done(), "an answer was sampled with half-loaded weights"
    run(world.sync())  # a whole one heals the engine
    assert {one.policy_version for one in run(held)} == {world.policy.policy_version}
    metrics = run(world.update(run(world.groups())))
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5


def assert_a_sync_is_repeated(world: World, death: str, caplog: pytest.LogCaptureFixture) -> None:
    """One of two engines fails in the middle of a sync; the other gets the weights."""
    groups = run(world.train())
    world.order.write_text(death)
    with caplog.at_level(logging.WARNING):
        run(world.weight_sync.publish(groups))
    assert not world.order.exists(), "no engine was in the middle of a sync"
    run(world.assert_all_serve_the_policy(groups, 1))
    (report,) = [record.getMessage() for record in caplog.records if "retrying" in record.getMessage()]
    assert "engine-" in report and "failed to send weights" in report
    assert ("core process died" in report) == (death == "core"), "a death is noticed without waiting for the deadline"


def test_a_sync_in_which_an_engine_hangs_is_repeated_with_the_others(world: World, caplog: pytest.LogCaptureFixture):
    before = world.pids
    assert_a_sync_is_repeated(world, "stop", caplog)
    run(world.whole_again())
    assert not [pid for pid in before - world.pids if psutil.pid_exists(pid)], "the engine still holds its device"


def test_requests_of_a_dead_engine_go_to_the_others_and_wait_for_a_new_one_where_all_have_died(world: World):
    async def under_way(index: int) -> asyncio.Task[list[Generation]]:
        """Requests of which some wait for an engine that is stopped, so that none of these can be answered."""
        world.core(index).suspend()
        requests = asyncio.create_task(world.answers(LONG))
        while not world.engines.router.loads[index]:
            await asyncio.sleep(0.01)
        return requests

    async def main() -> None:
        await world.train()
        await world.sync()
        expected = [one.token_ids for one in await world.answers()]
        requests = await under_way(0)
        world.core(0).kill()
        answers = await requests
        assert {one.policy_version for one in answers} == {world.policy.policy_version}
        assert all(one.stop_reason in ("stop", "length") for one in answers)
        assert len(world.engines.actors) == 1, "a new one joins at the next sync"
        requests = await under_way(1)
        psutil.Process(world.engines.replicas[1].started.pids[0][0]).kill()  # type: ignore[union-attr]
        assert {one.policy_version for one in await requests} == {world.policy.policy_version}
        assert [one.token_ids for one in await world.answers()] == expected, "not the weights of that version"
        await world.whole_again()

    run(main())


def test_the_run_ends_with_one_error_when_the_last_engine_dies(world: World, caplog: pytest.LogCaptureFixture):
    """The last test of the world: its engines are gone afterwards. The first dies in the middle of a sync."""
    for replica in world.engines.replicas:
        replica.max_restarts = 0
    assert_a_sync_is_repeated(world, "core", caplog)

    async def main() -> None:
        (index,) = [replica.index for replica in world.engines.replicas if replica.is_up]
        world.core(index).send_signal(signal.SIGKILL)
        with pytest.raises(RemoteFailed, match="no engine is left .*engine-0 .*engine-1 ") as caught:
            await world.answers(LONG)
        assert "core process died" in str(caught.value)
        with pytest.raises(RemoteFailed, match="no engine is left"):
            await world.weight_sync.publish([])

    run(main())
