"""Runs of skyrl_train 0.4's experiments without Ray and vLLM: the parts of the run, on a policy of this process."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.build import build_experience
from skyrl_train.batching.split import split
from skyrl_train.compat.run import HookedRun
from skyrl_train.config import Config
from skyrl_train.entrypoints.command import Ended, Interrupts
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.ranks import Rendezvous
from skyrl_train.rollout.env_pool import EnvPool
from skyrl_train.rollout.source import SourceParts
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.from_config import max_lengths, micro_batch_limits, objective, sampling_params
from skyrl_train.types import Generation, Group, SamplingParams
from tests.support.policies import ADAM
from tests.support.rollouts import Quiet
from tests.support.samples import in_order

KNOWN = "0123456789+-"


@dataclass
class Trained:
    """Two steps."""

    config: Config
    groups: list[list[Group]] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Those of the update, and `staleness`: optimizer steps since the samples, on average."""
    own_metrics: dict[str, float] = field(default_factory=dict)


class InProcess:
    """Trains runs one after the other, all on one policy. Its engine knows the characters of `KNOWN` alone."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._policy: MegatronPolicy | None = None

    def train(self, command: Any, config: Config, console: Console, interrupts: Interrupts) -> Ended:
        """In place of `entrypoints.command.run`: two steps of the run."""
        run: HookedRun = command.run(config, Console(quiet=True))
        if self._policy is None:
            settings = config.trainer.policy
            self._policy = MegatronPolicy(
                self._rendezvous, settings.model.path, settings.megatron_config, ADAM, goal_of(config), bf16=False,
                seed=1, num_optimizer_steps=100,
            )  # fmt: skip
        self._tokens = {each: run.tokenizer.encode(each, add_special_tokens=False) for each in KNOWN}
        self.trained = Trained(config)
        asyncio.run(self._two_steps(run, self._policy))
        self.trained.own_metrics = dict(run._own_metrics())
        return Ended(0)

    async def _two_steps(self, run: HookedRun, policy: MegatronPolicy) -> None:
        config, pool = run.config, EnvPool(4, 60.0)
        source: Any = run.get_source(
            SourceParts(
                config=config,
                prompts=run.train_prompts,
                sampling_params=sampling_params(config.generator.sampling_params),
                collector=run.get_collector(self._generate, run.get_rollout(pool)),
                progress=Quiet(),
                timers=Timers(),
                policy_version=lambda: policy.num_steps,
                num_steps=2,
                wake_engines=awake,
            )
        )
        for _ in range(2):
            self._step(run, policy, await source.next())
        if hasattr(source, "close"):
            await source.close()
        pool.close(timeout_s=5.0)

    def _step(self, run: HookedRun, policy: MegatronPolicy, groups: list[Group]) -> None:
        config, goal = run.config, goal_of(run.config)
        batch = build_experience(groups, policy.num_steps)
        limits = micro_batch_limits(config.trainer, run.model_config, 1)
        (shard,) = split(
            batch, limits, num_mini_batches=2, reductions=goal.reductions, max_lengths=max_lengths(config.generator),
            step_id=policy.num_steps,
        )  # fmt: skip
        versions = [sample.policy_version for group in groups for sample in group.samples]
        staleness = policy.num_steps - sum(versions) / len(versions)
        advantages = CreditAssignment(config.trainer.algorithm)(batch, None).advantages
        policy.keep_old_logprobs(shard)
        own = in_order(advantages, batch.cu_seqlens, shard.sample_ids)
        metrics = policy.update(shard, 1, goal, advantages=own).metrics
        self.trained.groups.append(groups)
        self.trained.advantages.append(advantages)
        self.trained.metrics.append({**metrics, "staleness": staleness})

    async def _generate(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        """Characters, each as likely as the others."""
        assert self._policy is not None
        await asyncio.sleep(0)
        chosen = random.Random(f"{params.seed} {token_ids}").choices(KNOWN, k=params.max_generate_length)
        tokens = [token for each in chosen for token in self._tokens[each]]
        return Generation(
            tokens, [-math.log(len(KNOWN))] * len(tokens), "".join(chosen), "stop", self._policy.num_steps
        )


def goal_of(config: Config) -> Objective:
    return objective(config.trainer.algorithm, config.generator.sampling_params)


async def awake() -> None:
    """The engine never sleeps."""
