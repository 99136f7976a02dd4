"""A run of reinforcement learning: steps on generated samples, with evaluation and transcripts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.policy_group import NoStepTaken
from skyrl_train.config import Config
from skyrl_train.rollout.metrics import rollout_metrics
from skyrl_train.rollout.seeds import seed
from skyrl_train.rollout.source import HoldsGroups, RollsBack, with_metrics_of
from skyrl_train.tracking.samples import SampleLog
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.trainer.evaluation import Evaluation, EvaluationBeside
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.performance import rollout_performance
from skyrl_train.trainer.run_state import Checkpoint
from skyrl_train.trainer.step import TrainingStep
from skyrl_train.types import Group, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a run, built by the entrypoint."""

    step: TrainingStep
    evaluation: Evaluation
    """For which training waits."""
    beside: EvaluationBeside
    tracker: Tracker
    samples: SampleLog


class Trainer(Loop):
    """Reinforcement learning on the groups of any source."""

    def __init__(self, config: Config, parts: Parts, num_steps: int) -> None:
        step = parts.step
        super().__init__(config.trainer, step.source, step.policy, parts.tracker, step.timers, num_steps)
        self._config, self._parts = config, parts
        self._residency, self._critic = step.residency, step.critic
        self._models += [] if step.critic is None else [step.critic.group]
        self._beside = parts.beside
        self._coefficients = self.coefficients
        """Those before the last step."""

    @property
    def can_evaluate(self) -> bool:
        return bool(self._parts.evaluation.prompts)

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            await self._beside.cancel("the run ended before it")
            if (close := getattr(self._parts.step.source, "close", None)) is not None:
                await close()

    async def undone(self, error: Exception) -> bool:
        step = self._parts.step
        if step.has_begun or not await self._can_save(error):
            return False
        if step.groups and isinstance(step.source, HoldsGroups) and not self._rolls_back(step.source):
            return False
        step.coefficients.resume(self._coefficients)
        return True

    def _rolls_back(self, source: HoldsGroups) -> bool:
        """Return the groups of the failed step to their source; False if it cannot take them."""
        if not isinstance(source, RollsBack):
            return False
        try:
            source.roll_back()
        except Exception:  # the error of the step is the one to end with
            log.exception("the groups of step %d could not be returned to their source", self.global_step + 1)
            return False
        return True

    async def _can_save(self, error: Exception) -> bool:
        """Whether the models can be saved, although a process may have failed after the step got its groups: not where
        processes take turns, because it may have failed while memory moved, unless it did so in an update.
        """
        if not self._parts.step.groups or not isinstance(error, RemoteFailed) or isinstance(error, NoStepTaken):
            return True
        takes_turns = self._config.trainer.placement.takes_turns
        return not takes_turns and all([await model.is_idle() for model in self._models])

    async def evaluate(self) -> Metrics:
        """Scores of greedy or sampled responses to the held-out prompts."""
        await self._parts.step.residency.for_rollout()
        return await self._parts.evaluation.run(self._evaluation_seed, self.global_step)

    @property
    def _evaluation_seed(self) -> int:
        return seed("eval", self._config.trainer.seed, self.global_step)

    async def evaluate_beside(self) -> bool:
        if not self._config.trainer.evaluates_beside:
            return False
        if self.global_step >= self._num_steps:
            await self._beside.cancel("that of the last step replaces it")
            return False
        await self._parts.step.residency.for_rollout()
        await self._beside.begin(self.global_step, self._evaluation_seed)
        return True

    def ended_evaluation(self) -> Metrics:
        step, ended = self._beside.step, self._beside.ended(self.global_step)
        if not ended or self.global_step < self._num_steps:
            return ended
        # Its keys are those of the last step's evaluation, which is logged with the same step.
        log.info("the evaluation of step %d ended with avg_score %.4f", step, ended["eval/all/avg_score"])
        return {}

    @property
    def is_evaluating(self) -> bool:
        return self._beside.step == self.global_step

    @property
    def coefficients(self) -> dict[str, float]:
        return self._parts.step.coefficients.state

    def resume(self, checkpoint: Checkpoint) -> None:
        super().resume(checkpoint)
        self._parts.step.coefficients.resume(checkpoint.state.coefficients)

    async def step(self) -> Metrics:
        step = self._parts.step
        step.groups, self._coefficients = (), dict(step.coefficients.state)
        metrics, groups = await step.step(), step.groups
        self._log_samples(groups)
        rollouts = rollout_metrics(groups, self._config.environment.pass_threshold)
        metrics |= rollouts | rollout_performance(groups, self._timers)
        return with_metrics_of(step.source, metrics)

    def _log_samples(self, groups: Sequence[Group]) -> None:
        trainer = self._config.trainer
        if trainer.log_samples_interval > 0 and self.global_step % trainer.log_samples_interval == 0:
            self._parts.samples.training(self.global_step + 1, groups, trainer.num_logged_samples)
