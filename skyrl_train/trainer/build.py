"""Assembly of a run from its configuration, for training and the service."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.tables import compares_with_greedy
from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import Config
from skyrl_train.data.hints import Hints
from skyrl_train.hf.matrices import num_experts
from skyrl_train.ranks import SavedState
from skyrl_train.rollout.source import GroupSource
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.agreement.logprob_bound import LogprobBound
from skyrl_train.trainer.agreement.sync_check import FirstCheck, SyncCheck
from skyrl_train.trainer.credit import LearningSignal
from skyrl_train.trainer.from_config import micro_batch_limits, objective, staleness_buckets
from skyrl_train.trainer.performance import MemoryReport
from skyrl_train.trainer.publisher import Publisher
from skyrl_train.trainer.residency import Colocated, Residency
from skyrl_train.trainer.scorers import Critic, EngineScorer, Scorers, critic_scorer
from skyrl_train.trainer.sft import FineTuning
from skyrl_train.trainer.step import TrainingStep


def max_model_len(config: Config, model: PretrainedConfig) -> int:
    """Tokens of the longest prompt with its response that an engine has to take."""
    return min(config.generator.longest_conversation, model.get_text_config().max_position_embeddings)


def teacher_max_model_len(config: Config, model: PretrainedConfig, hints: Hints | None = None) -> int:
    """Tokens that an engine of a teacher has to take: those of the longest sample, and one that it generates.

    Args: hints: of its prompts; samples of unknown length may fill the model's context.
    Raises: ValueError if a sample may fill the model's context, which leaves no room for that one.
    """
    positions, generator, teacher = model.max_position_embeddings, config.generator, config.trainer.teacher
    longest = generator.max_input_length + generator.sampling_params.max_generate_length
    if teacher.is_served and longest >= positions:
        raise ValueError(
            f"trainer.teacher.backend is {teacher.backend}: engines score samples of fewer than the model's "
            f"{positions} positions, and max_input_length + max_generate_length is {longest}. Lower one of them"
        )
    if hints is None:
        return longest + 1
    return positions if hints.max_tokens is None else max(longest, hints.max_tokens) + 1


async def launch_training(
    config: Config,
    model: PretrainedConfig,
    cluster: Cluster,
    num_optimizer_steps: int,
    logs: str,
    saved: SavedState | None = None,
    hints: Hints | None = None,
) -> Processes:
    """Start the processes of reinforcement learning. Args: hints: of the prompts of teachers; the others like `launch`,
    as is what it raises.
    """
    return await launch(
        config,
        cluster,
        max_model_len=max_model_len(config, model),
        teacher_max_model_len=teacher_max_model_len(config, model, hints),
        objective=_objective(config),
        num_optimizer_steps=num_optimizer_steps,
        logs=logs,
        saved=saved,
    )


class Assembly:
    """Parts of a run on started processes."""

    def __init__(self, config: Config, model: PretrainedConfig, processes: Processes, timers: Timers) -> None:
        trainer = config.trainer
        self._config, self._model, self._processes, self._timers = config, model, processes, timers
        self._limits = micro_batch_limits(trainer, model, processes.policy.dp_size)
        half_or_full = "bfloat16" if trainer.bf16 else config.generator.model_dtype
        self._coarser_dtype = config.generator.quantization or half_or_full
        # Running servers keep vLLM's default, TensorFloat-32; engines of this project do not (engines/settings.py).
        self._tensor_float = processes.cluster.has_gpus and not config.generator.run_engines_locally
        self._check = SyncCheck(
            trainer.verify_sync_every,
            self._coarser_dtype,
            self._limits,
            tensor_float=self._tensor_float,
            max_tokens=max_model_len(config, model),
        )
        processes.weight_sync.check = self._check
        self.residency = self._residency()

    @property
    def with_greedy(self) -> bool:
        """Whether the source must also generate a greedy response to each prompt."""
        return compares_with_greedy(self._config.trainer.algorithm.advantage_estimator)

    def _residency(self) -> Residency:
        processes = self._processes
        policy, scorers, engines, sync = processes.policy, processes.scorers, processes.engines, processes.weight_sync
        if processes.critic is not None:
            scorers = (*scorers, critic_scorer(processes.critic))
        report = MemoryReport(policy, scorers, engines)
        if not processes.sharing.takes_turns:
            return Residency(sync, scorers, report)
        return Colocated(policy, scorers, engines, sync, report)

    def step(
        self, source: GroupSource, publisher: Publisher, *, hints: Hints | None = None, always_updates: bool = False
    ) -> TrainingStep:
        """Args: hints: of the prompts that teachers read; always_updates: update also without a learning signal."""
        config, trainer, policy = self._config, self._config.trainer, self._processes.policy
        group, own = self._processes.critic, _objective(config)
        served = zip(trainer.served_teachers, self._processes.teachers, strict=True)
        teachers = [EngineScorer(model.name, engines, model.data_sources) for model, engines in served]
        return TrainingStep(
            config=config,
            source=source,
            policy=policy,
            residency=self.residency,
            critic=None if group is None else Critic(config, self._model, group, self.residency),
            scorers=Scorers(
                trainer,
                policy,
                (*self._processes.scorers, *teachers),
                self.residency,
                has_selections=bool(own.selections),
            ),
            hints=hints,
            publisher=publisher,
            first_check=FirstCheck(self._check, policy, self._processes.engines),
            logprob_bound=LogprobBound(
                trainer.logprob_difference,
                self._coarser_dtype,
                tensor_float=self._tensor_float,
                has_experts=num_experts(self._model) > 0,
            ),
            learning_signal=learning_signal(config, self._model, always_updates=always_updates),
            objective=own,
            limits=self._limits,
            timers=self._timers,
            vocab_size=self._model.vocab_size,
        )

    def fine_tuning(self) -> FineTuning:
        return FineTuning(self._processes.policy, self._limits, self._timers)


def learning_signal(config: Config, model: PretrainedConfig, *, always_updates: bool = False) -> LearningSignal:
    """Args: always_updates: every step counts as one with signal."""
    algorithm = config.trainer.algorithm
    has_balancing = config.trainer.policy.megatron_config.moe_aux_loss_coeff > 0 and num_experts(model) > 0
    has_penalty = algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0
    needs_tokens = not (always_updates or has_balancing)
    has_other_terms = not needs_tokens or has_penalty or algorithm.needs_critic
    return LearningSignal(_objective(config), has_other_terms=has_other_terms, needs_tokens=needs_tokens)


def _objective(config: Config) -> Objective:
    whole = objective(config.trainer.algorithm, config.generator.sampling_params)
    return replace(whole, buckets=staleness_buckets(config.trainer))
