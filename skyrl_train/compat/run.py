"""A run whose parts are the hooks of an experiment of skyrl_train 0.4."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from math import prod
from numbers import Real
from typing import TYPE_CHECKING, Any

from rich.console import Console

from skyrl_train.algorithms.build import needs_logprobs
from skyrl_train.compat.dataset import prompts_of
from skyrl_train.compat.generators.collector import GeneratorCollector, Postprocessed
from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.generators.types import GeneratorOutput
from skyrl_train.compat.trainer import RayPPOTrainer, overridden
from skyrl_train.config import Config
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Rollout
from skyrl_train.rollout.source import GroupSource, SourceParts
from skyrl_train.trainer.evaluation import Evaluation
from skyrl_train.trainer.trainer import Parts, Trainer
from skyrl_train.types import Generate, Metrics, Prompt

if TYPE_CHECKING:
    from skyrl_train.compat.experiment import BasePPOExp


class HookedRun(Experiment):
    def __init__(self, hooks: BasePPOExp, trainer: RayPPOTrainer, config: Config, console: Console) -> None:
        self._hooks, self._old = hooks, trainer
        has_own_loop = overridden(type(trainer.generator), SkyRLGymGenerator, "agent_loop")
        self._generator = trainer.generator if has_own_loop or not self._plays_environments else None
        self._reported = Reports()
        super().__init__(config, console)
        trainer.step_of_run = self._step

    def _step(self) -> int:
        return 0 if self.loop is None else self.loop.global_step

    @property
    def _plays_environments(self) -> bool:
        kind = type(self._old.generator)
        return issubclass(kind, SkyRLGymGenerator) and not overridden(kind, SkyRLGymGenerator, "generate")

    def _check_environments(self) -> None:
        if self._plays_environments:
            super()._check_environments()

    def _check_conversations(self) -> None:
        if self._plays_environments:
            super()._check_conversations()

    def get_tokenizer(self) -> Any:
        return self._hooks.tokenizer

    def get_train_prompts(self) -> list[Prompt]:
        return prompts_of(self._hooks.train_dataset, self.config.environment.env_class)

    def get_val_prompts(self) -> list[Prompt]:
        return prompts_of(self._hooks.eval_dataset, self.config.environment.env_class)

    def get_collector(self, generate: Generate, rollout: Rollout) -> Collector:
        plain = super().get_collector(generate, rollout)
        if self._generator is None:
            return plain
        arguments = plain.engines, self._step, self._reported.add, plain.deadline_s
        return GeneratorCollector(self._generator, rollout, *arguments)

    def get_source(self, parts: SourceParts) -> GroupSource:
        collector = parts.collector
        if isinstance(collector, GeneratorCollector):
            needs = needs_logprobs(self.config.trainer.algorithm.values)
            collector = collector.for_training(parts.policy_version, needs_logprobs=needs)
        if self._old.postprocesses:
            collector = self._postprocessed(collector)
        return super().get_source(dataclasses.replace(parts, collector=collector))

    def _postprocessed(self, collector: Collector) -> Collector:
        def gives_token_rewards() -> bool:  # with one turn numbers, like 0.4's generator with batched=true
            own = collector.gives_token_rewards if isinstance(collector, GeneratorCollector) else None
            return self.config.generator.max_turns > 1 if own is None else own

        return Postprocessed(
            collector,
            self._postprocess,
            gives_token_rewards,
            filters=self.config.trainer.algorithm.dynamic_sampling.type is not None,
            zeroes_unfinished=self._hooks.cfg.generator.zero_reward_on_non_stop,
        )

    def get_evaluation(self, collector: Collector, samples: Any) -> Evaluation:
        """Its key is false in the run's configuration if a hook gets zeroed rewards."""
        zeroes = self._hooks.cfg.generator.zero_reward_on_non_stop
        return dataclasses.replace(super().get_evaluation(collector, samples), zeroes_unfinished=zeroes)

    def get_trainer(self, parts: Parts) -> Trainer:
        return _Trainer(self.config, parts, self.num_steps, self._own_metrics)

    def _postprocess(self, output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        changed = self._old.postprocess_generator_output(output, uids)
        self._reported.add_those_of(self._old)
        return changed

    def _own_metrics(self) -> Metrics:
        self._reported.add_those_of(self._old)
        return self._reported.take()


class Reports:
    """What generators and hooks have reported since the last step, group by group."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._timings: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Ignores values that are not numbers."""
        for name, value in _numbers(metrics):
            self._values.setdefault(name, []).append(value)

    def add_those_of(self, trainer: RayPPOTrainer) -> None:
        """Add `all_metrics` and `all_timings`, and clear them."""
        self.add(trainer.all_metrics)
        for name, seconds in _numbers(trainer.all_timings):
            self._timings[name] = self._timings.get(name, 0.0) + seconds
        trainer.all_metrics.clear()
        trainer.all_timings.clear()

    def take(self) -> Metrics:
        """Means of the metrics and sums of the timings (timing/*); then there are none."""
        means = {name: sum(each) / len(each) for name, each in self._values.items()}
        timings = {f"timing/{name}": seconds for name, seconds in self._timings.items()}
        self._values, self._timings = {}, {}
        return means | timings


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of Python and numpy, and those in tensors and arrays of one element."""
    for name, value in values.items():
        number = value.item() if getattr(value, "shape", None) is not None and prod(value.shape) == 1 else value
        if isinstance(number, Real):
            yield name, float(number)


class _Trainer(Trainer):
    def __init__(self, config: Config, parts: Parts, num_steps: int, own_metrics: Callable[[], Metrics]) -> None:
        super().__init__(config, parts, num_steps)
        self._own_metrics = own_metrics

    async def step(self) -> Metrics:
        metrics = await super().step()
        return {**self._own_metrics(), **metrics}
