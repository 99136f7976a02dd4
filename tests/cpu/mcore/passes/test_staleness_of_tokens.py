"""The staleness of every token that a loss reads, and of the log, is what the engine saw that wrote it."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.staleness import Buckets
from skyrl_train.batching.build import build_experience
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import split
from skyrl_train.config import load_config
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines
from skyrl_train.rollout.source import SourceParts
from skyrl_train.rollout.streaming.streaming import StreamingSource
from skyrl_train.rollout.trace import Trace
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.from_config import max_lengths
from skyrl_train.types import Generation, Group, Prompt, Sample, SamplingParams
from tests.support.rollouts import CHAT, Quiet, prompt

CONFIG = [
    "trainer.source=streaming",
    "trainer.max_staleness=3",
    "trainer.pipeline_depth=2",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "generator.sampling_params.max_generate_length=12",
]
VERSIONS_PER_STEP = 2


class Stamping:
    """An engine, and the tokenizer, that gives each token an id of its own and notes the weights that wrote it."""

    def __init__(self, *, aborts: bool) -> None:
        """Args: aborts: a change of the weights ends a response, which its caller continues; else it continues."""
        self.version, self.aborts = 0, aborts
        self.version_of: dict[int, int] = {}
        self.num_continued = 0
        self._ids = itertools.count(100)

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        written: list[int] = []
        started = self.version
        self.num_continued += token_ids[-1] in self.version_of
        for _ in range(min(params.max_generate_length, random.Random(f"{token_ids} {params.seed}").randint(1, 12))):
            await asyncio.sleep(0)
            if self.aborts and self.version != started:
                return self._generation(written, "abort", started)
            written.append(next(self._ids))
            self.version_of[written[-1]] = self.version
        return self._generation(written, "stop", started)

    def _generation(self, written: list[int], stop_reason: str, started: int) -> Generation:
        runs = itertools.groupby(self.version_of[token] for token in written)
        spans = tuple((version, len(list(run))) for version, run in runs) or ((started, 0),)
        return Generation(written, [-1.0] * len(written), "", stop_reason, spans[0][0], spans)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return ""


async def two_turns(row: Prompt, params: SamplingParams, engines: Engines) -> Sample:
    trace = Trace()
    for observation in ([4, 5], [6]):
        trace.read(observation)
        trace.write(await engines.generate(trace.input_ids(), params, row.uid))
        await asyncio.sleep(0)
    trace.add_reward(1.0)
    return trace.to_sample()


def staleness_in_the_loss(groups: list[Group], version: int, config: Any) -> dict[int, int]:
    """Token -> its staleness at the predicting position, over all mini-batches of two data- and two context-parallel
    ranks."""
    limits = MicroBatchLimits(dp_size=2, max_tokens=48, max_sample_tokens=1000, pad_multiple=4)
    shards = split(
        build_experience(groups, version),
        limits,
        num_mini_batches=VERSIONS_PER_STEP,
        reductions=("token_mean",),
        max_lengths=max_lengths(config.generator),
    )
    found: dict[int, int] = {}
    for shard, cp_rank in itertools.product(shards, (0, 1)):
        packer = Packer(4, cp_rank, 2, torch.device("cpu"))
        for samples in itertools.chain(*shard.mini_batches):
            targets = packer.pack(shard, samples).targets
            ids, behind = (x[targets.loss_mask].tolist() for x in (targets.labels, targets.signals["staleness"]))
            assert not found.keys() & set(ids)
            found |= dict(zip(ids, behind, strict=True))
    return found


@pytest.mark.parametrize("aborts", [False, True], ids=["keep", "abort"])
def test_each_token_has_the_staleness_that_the_engine_saw_in_the_loss_and_in_the_log(aborts: bool):
    async def main() -> None:
        config, engine = load_config(CONFIG), Stamping(aborts=aborts)
        engines = Engines(engine, engine, CHAT, max_input_length=99, max_turns=2)  # type: ignore[arg-type]
        source = StreamingSource(
            SourceParts(
                config=config,
                prompts=[prompt(str(n)) for n in range(10)],
                sampling_params=SamplingParams(max_generate_length=12, seed=1),
                collector=Collector(two_turns, engines),
                progress=Quiet(),
                timers=Timers(),
                wake_engines=lambda: asyncio.sleep(0),
                policy_version=lambda: engine.version,
                num_steps=None,
            )
        )
        buckets, seen = Buckets(config.trainer.staleness, config.trainer.versions_per_step), set()
        for step in range(12):
            groups = await source.next()
            saw = {
                token: engine.version - engine.version_of[token]
                for group in groups
                for sample in group.samples
                for token in sample.token_ids.tolist()
                if token in engine.version_of
            }
            assert staleness_in_the_loss(groups, engine.version, config) == saw
            behind = buckets.of(torch.tensor(list(saw.values())))
            assert behind.tolist() == [step - engine.version_of[token] // VERSIONS_PER_STEP for token in saw]
            metrics = source.metrics()
            assert metrics["async/staleness_mean"] == pytest.approx(float(behind.double().mean()), rel=1e-12)
            assert metrics["async/staleness_max"] == int(behind.max()) <= config.trainer.staleness
            shares = [float((behind == n).double().mean()) for n in range(4)]
            assert shares == pytest.approx([metrics[f"async/share_{n}_behind"] for n in range(4)], rel=1e-12)
            seen |= {len(set(versions_of(sample))) for group in groups for sample in group.samples}
            for _ in range(7):  # rollouts go on while the policy is updated
                await asyncio.sleep(0)
            engine.version += VERSIONS_PER_STEP
        assert max(seen) > 2, "samples of several versions"
        assert (engine.num_continued > 0) is aborts, "partial rollouts"
        await source.close()

    asyncio.run(main())


def versions_of(sample: Sample) -> list[int]:
    return [version for version, _ in sample.version_spans]
