"""A synced engine answers as a fresh one on the export; a sync that went wrong ends before an answer. Through Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.batching.build import build_experience
from skyrl_train.batching.split import split
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config, load_config
from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.from_config import micro_batch_limits, objective
from skyrl_train.types import ExperienceBatch, Generation, Group, Prompt, SamplingParams
from tests.support import planted_faults
from tests.support.samples import sample
from tests.support.settings import MIB, engine_settings
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LOOP = asyncio.new_event_loop()
MAX_LEN = 128
GREEDY = SamplingParams(max_generate_length=12, temperature=0.0)
SAMPLED = SamplingParams(max_generate_length=12, temperature=1.0)
# The first is longer than two blocks of the engine's cache, so that its prefix is kept.
PROMPTS = [[4 + (11 * n + k) % 50 for k in range(70 if n == 0 else 5 + n)] for n in range(8)]


def run(awaitable: Any, timeout_s: float = 200) -> Any:
    return LOOP.run_until_complete(asyncio.wait_for(awaitable, timeout_s))


def config_of(folder: Path) -> Config:
    return load_config(
        [
            f"trainer.policy.model.path={folder}",
            "data.train_data=[none.jsonl]",
            "trainer.bf16=false",
            "trainer.placement.policy_num_gpus_per_node=2",
            "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
            "trainer.policy.optimizer_config.lr=1e-2",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.train_batch_size=8",
            "trainer.policy_mini_batch_size=8",
            "trainer.max_tokens_per_microbatch=128",
            "trainer.timeout_s=200",
            "generator.weight_sync_bucket_mb=1",
            "generator.weight_sync_timeout_s=20",
            "generator.kv_cache_memory_gb=0.0625",
            "generator.max_input_length=100",
            "generator.engine_init_kwargs={block_size: 32}",
        ]
    )


class World:
    """A policy in two stages and an engine, both running."""

    def __init__(self, config: Config, processes: Processes, folder: Path) -> None:
        self.config, self.processes, self.folder = config, processes, folder

    async def answers(self, params: SamplingParams = GREEDY) -> list[Generation]:
        return await asyncio.gather(
            *(self.processes.engines.generate(prompt, params, str(n)) for n, prompt in enumerate(PROMPTS))
        )

    async def experience(self) -> ExperienceBatch:
        """Two sampled answers to each prompt; the reward prefers some tokens, so the update is not zero."""
        once, again = await self.answers(SAMPLED), await self.answers(SAMPLED)
        groups = [
            Group(Prompt(str(n), [], "none", {}, "none"), (sample(PROMPTS[n], a, 0.0), sample(PROMPTS[n], b, 1.0)))
            for n, (a, b) in enumerate(zip(once, again, strict=True))
        ]
        return build_experience(groups, self.processes.policy.policy_version)

    async def update(self, experience: ExperienceBatch) -> dict[str, float]:
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(self.config.trainer.policy.model.path)
        rules = micro_batch_limits(self.config.trainer, model, self.processes.policy.dp_size)
        shards = Shards(split(experience, rules))
        credit = CreditAssignment(self.config.trainer.algorithm)(experience)
        signals = {"advantages": shards.put(credit.advantages, experience)}
        metrics, _ = await self.processes.policy.update(shards, signals)
        return metrics

    async def sync(self) -> None:
        await self.processes.weight_sync.send_once()

    async def export(self) -> Path:
        target = self.folder / f"version_{self.processes.policy.policy_version}"
        await self.processes.policy.save_hf(str(target))
        return target


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("sync")
    config = config_of(write_tiny_model(folder / "model", num_hidden_layers=8))

    async def start(self: PolicyGroup, kwargs: dict[str, Any], saved: None) -> None:
        self.ranks = await self.group.build("tests.support.planted_faults:FaultyPolicy", kwargs)

    goal = objective(config.trainer.algorithm, config.generator.sampling_params, 1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(PolicyGroup, "start", start)
        with connect() as cluster:
            logs = str(folder / "logs")
            started = launch(config, cluster, max_model_len=MAX_LEN, objective=goal, num_optimizer_steps=10, logs=logs)
            processes = run(started)
            try:
                yield World(config, processes, folder)
            finally:
                run(processes.stop())


def fresh_answers(folder: Path) -> list[Generation]:
    """Of an engine that is started on the checkpoint."""

    async def main() -> list[Generation]:
        engine = VllmEngine(
            engine_settings(
                model_path=str(folder),
                served_model_name="fresh",
                model_dtype="float32",
                max_model_len=MAX_LEN,
                kv_cache_memory_gb=64 * MIB,
                engine_init_kwargs={"block_size": 32},
            )
        )
        try:
            requests = [(n, prompt, GREEDY) for n, prompt in enumerate(PROMPTS)]
            found: dict[int, Generation] = {}
            async for finished in engine.generate_batch(requests):
                found |= dict(finished)
            return [found[n] for n in range(len(PROMPTS))]
        finally:
            await engine.shutdown()

    return run(main())


def test_engine_and_policy_agree_before_an_update_and_the_update_moves_the_policy(world: World):
    experience = run(world.experience())
    before = run(world.update(experience))
    assert 0 < before["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    stale = run(world.update(experience))
    assert stale["policy/rollout_train_logprobs_abs_diff_mean"] > 1e-3, "the engine's weights are two updates old"


def test_a_synced_engine_answers_as_a_fresh_one_that_loads_the_export(world: World):
    for _ in range(2):  # tasks and buffers of the first sync must not leak into the second
        run(world.update(run(world.experience())))
        run(world.sync())
    served = run(world.answers())
    fresh = fresh_answers(run(world.export()))
    assert [one.token_ids for one in served] == [one.token_ids for one in fresh]
    for one, other in zip(served, fresh, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.policy_version == world.processes.policy.policy_version
        assert other.policy_version == 0


def test_a_repeated_prompt_is_answered_anew_after_a_sync(world: World):
    """Also its prefix, which the engine keeps: with old keys and values its logprobs would not be the policy's."""
    before = run(world.answers())
    assert [one.logprobs for one in run(world.answers())] == [one.logprobs for one in before]
    run(world.update(run(world.experience())))
    run(world.sync())
    after = run(world.answers())
    assert all(one.logprobs != other.logprobs for one, other in zip(before, after, strict=True))
    asked = [PROMPTS[n] + generation.token_ids for n, generation in enumerate(after)]
    (scored,) = run(world.processes.engines.prompt_logprobs(asked)).values()
    for n, generation in enumerate(after):
        assert generation.logprobs == pytest.approx(scored[n][len(PROMPTS[n]) :], abs=1e-4)
    experience = run(world.experience())
    metrics = run(world.update(replace(experience)))
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5


def test_a_sync_of_unchanged_weights_changes_no_answer(world: World):
    run(world.sync())
    before = run(world.answers())
    run(world.sync())
    assert [(one.token_ids, one.logprobs) for one in run(world.answers())] == [
        (one.token_ids, one.logprobs) for one in before
    ]


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
def test_a_planted_fault_stops_the_sync_before_an_answer_is_drawn(world: World, fault: str, message: str):
    policy = world.processes.policy.group
    run(policy.all("remember"))
    run(world.update(run(world.experience())))
    run(policy.all("plant", fault))
    with pytest.raises(RemoteFailed, match=message):
        run(world.sync())
    with pytest.raises(RemoteFailed, match="the last weight update did not complete"):
        run(world.processes.engines.resume())
    held = asyncio.ensure_future(world.answers(), loop=LOOP)
    LOOP.run_until_complete(asyncio.sleep(1))
    assert not held.done(), "an answer was drawn with half-loaded weights"
    run(world.sync())  # a whole one heals the engine
    assert {one.policy_version for one in run(held)} == {world.processes.policy.policy_version}
    metrics = run(world.update(run(world.experience())))
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
