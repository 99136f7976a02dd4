"""The configuration of reinforcement learning: frozen dataclasses with the keys of configs/ppo_base_config.yaml.

The YAML owns every value and comment, so no field has a default. `main_config` reads a command line, `load_config` a
list of overrides; both raise ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import (
    CriticConfig,
    ParallelSizes,
    RefConfig,
    ScoringModel,
    SyncedPolicyConfig,
    TeacherConfig,
)
from skyrl_train.config.program import Program
from skyrl_train.config.skyrl_04.max_seq_len import with_max_seq_len, without_max_seq_len
from skyrl_train.config.training import PolicyPlacementConfig, RunConfig, TrainingConfig
from skyrl_train.config.values import AboveZero, Bounds, Count, CountOrNever, CountOrZero, OneOf, Text

VERIFYING_SAMPLES = 8
"""Samples on which engines and trainer are compared (`trainer.verify_sync_every`)."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(PolicyPlacementConfig):
    """Devices and processes."""

    colocate_all: bool
    release: Annotated[str, OneOf(("offload", "none"))] | None
    state_path: Text
    ref_num_nodes: Count
    ref_num_gpus_per_node: Count
    critic_num_nodes: Count
    critic_num_gpus_per_node: Count
    teacher_num_nodes: Count
    teacher_num_gpus_per_node: Count

    @property
    def takes_turns(self) -> bool:
        """Whether processes on the same devices free their memory for each other."""
        return self.colocate_all and self.release != "none"

    @property
    def num_ref_ranks(self) -> int:
        return self.ref_num_nodes * self.ref_num_gpus_per_node

    @property
    def num_critic_ranks(self) -> int:
        return self.critic_num_nodes * self.critic_num_gpus_per_node

    @property
    def num_teacher_ranks(self) -> int:
        return self.teacher_num_nodes * self.teacher_num_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class LogprobDifferenceConfig:
    """Bounds on the mean |engine - trainer| logprob difference of a step's samples, before the update."""

    warn: AboveZero | None
    fail: AboveZero | None


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainingConfig):
    """Sizes, intervals and outputs of a run."""

    placement: PlacementConfig
    policy: SyncedPolicyConfig
    over_sampling_batch_size: Count | None
    policy_mini_batch_size: Count
    critic_mini_batch_size: Count
    update_epochs_per_batch: Count
    max_prompt_length: Count
    log_samples_interval: CountOrNever
    num_logged_samples: Annotated[int, Bounds(low=-1)]
    dump_eval_results: bool
    verify_sync_every: CountOrZero
    logprob_difference: LogprobDifferenceConfig
    custom_modules: tuple[Text, ...]
    strict_config: bool
    ref: RefConfig
    critic: CriticConfig
    teacher: TeacherConfig
    source: Text
    max_staleness: CountOrZero | None
    pipeline_depth: CountOrZero | None
    eval_beside_training: bool | None
    algorithm: AlgorithmConfig

    @property
    def staleness(self) -> int:
        """Steps between the weights that sampled a token and those that train it, at most."""
        return int(self.source == "streaming") if self.max_staleness is None else self.max_staleness

    @property
    def versions_per_step(self) -> int:
        """Optimizer steps of a step, each of which is a policy version."""
        return self.train_batch_size // self.policy_mini_batch_size * self.update_epochs_per_batch

    @property
    def depth(self) -> int:
        """Batches that a streaming source generates ahead."""
        return min(1, self.staleness) if self.pipeline_depth is None else self.pipeline_depth

    @property
    def evaluates_beside(self) -> bool:
        """Whether training continues during an evaluation, by default where samples may be stale."""
        if self.source != "streaming":
            return False
        return self.staleness > 0 if self.eval_beside_training is None else self.eval_beside_training

    @property
    def groups_in_flight(self) -> int:
        """Groups that engines may generate at a time."""
        if self.over_sampling_batch_size is not None:
            return self.over_sampling_batch_size
        return self.train_batch_size * (self.depth + 1 if self.source == "streaming" else 1)

    @property
    def frozen_models(self) -> tuple[ScoringModel, ...]:
        """Models with their own processes that score each step; with LoRA the reference is the policy without
        adapters, and so is a teacher of the same path.
        """
        has_reference = self.algorithm.needs_reference and self.policy.model.lora.rank == 0
        num_ranks = self.placement.num_ref_ranks
        reference = [_scoring_model("reference", "ref_logprobs", "ref", self.ref, num_ranks)] if has_reference else []
        elsewhere = (*self.served_teachers, *self.base_teachers)
        return (*reference, *(model for model in self._teachers if model not in elsewhere))

    @property
    def base_teachers(self) -> tuple[ScoringModel, ...]:
        """Teachers whose weights are those of the policy without its adapters."""
        if self.teacher.backend != "megatron" or self.policy.model.lora.rank == 0:
            return ()
        return tuple(model for model in self._teachers if model.model_path == self.policy.model.path)

    @property
    def served_teachers(self) -> tuple[ScoringModel, ...]:
        """Teachers that engines or running servers score with, instead of ranks."""
        return self._teachers if self.teacher.is_served else ()

    @property
    def engine_teachers(self) -> tuple[ScoringModel, ...]:
        """Teachers that score on dedicated engines."""
        return self._teachers if self.teacher.backend == "engine" else ()

    @property
    def _teachers(self) -> tuple[ScoringModel, ...]:
        return self.teacher.models(self.placement.num_teacher_ranks)

    @property
    def scoring_models(self) -> tuple[ScoringModel, ...]:
        """Models with their own processes, besides the policy: frozen ones, and the critic as the last."""
        if not self.algorithm.needs_critic:
            return self.frozen_models
        critic = _scoring_model("critic", "values", "critic", self.critic, self.placement.num_critic_ranks)
        return (*self.frozen_models, critic)


def _scoring_model(name: str, signal: str, section: str, own: RefConfig | CriticConfig, ranks: int) -> ScoringModel:
    """The reference or the critic."""
    path_key = f"trainer.{section}.model.path"
    return ScoringModel(name, signal, section, path_key, own.model.path, own.megatron_config, ranks)


@dataclass(frozen=True, kw_only=True)
class SkyrlGymConfig:
    """skyrl-gym environments."""

    max_env_workers: Count
    env_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The environments that score the responses."""

    env_class: Text
    reward_fn: tuple[Text, ...]
    reward_weights: tuple[float, ...]
    pass_threshold: float
    allowed_env_classes: tuple[Text, ...]
    step_timeout_s: AboveZero
    skyrl_gym: SkyrlGymConfig

    @property
    def env_kwargs(self) -> dict[str, Any]:
        """env_class -> settings of its environments."""
        if not self.reward_fn:
            return self.skyrl_gym.env_kwargs
        weights = list(self.reward_weights or (1.0,) * len(self.reward_fn))
        functions = {"functions": list(self.reward_fn), "weights": weights}
        return {**self.skyrl_gym.env_kwargs, "reward_fn": functions}


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The configuration of reinforcement learning."""

    trainer: TrainerConfig
    generator: GeneratorConfig
    environment: EnvironmentConfig

    @property
    def written(self) -> Self:
        """What is written into config.yaml."""
        return without_max_seq_len(self)


RL = Program(
    module="skyrl_train.entrypoints.main_base",
    purpose="Train a language model by reinforcement learning.",
    schema=Config,
    base_name="ppo_base_config",
    complete=with_max_seq_len,
)
load_config, main_config = RL.load, RL.read


@dataclass(frozen=True, kw_only=True)
class AgainstConfig(ParallelSizes):
    """The layout to compare with."""

    num_ranks: Count | None


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The mini-batch and the layouts that are compared."""

    num_ranks: Count | None
    num_samples: Count
    max_length: Annotated[int, Bounds(low=2)]
    max_tokens_per_microbatch: Count
    timeout_s: AboveZero
    json_file: Text | None
    against: AgainstConfig


@dataclass(frozen=True, kw_only=True)
class VerifyLayoutConfig(Config):
    """The configuration of a training run, and what is compared."""

    verify: VerifyConfig


VERIFY = Program(
    module="skyrl_train.entrypoints.verify_layout",
    purpose="Check that a parallel layout computes what Hugging Face computes.",
    schema=VerifyLayoutConfig,
    base_name="verify_layout_config",
)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What the forecast is about, beside the run."""

    device: Text | None
    shape: Text | None
    num_layers: Count | None
    prompt_tokens: Count | None
    response_tokens: Count | None
    propose: bool
    json_file: Text | None


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Config):
    """The configuration of a training run, and how it is forecast."""

    plan: PlanSettings


PLAN = Program(
    module="skyrl_train.entrypoints.plan",
    purpose="Forecast the memory and time of a run, and propose a layout.",
    schema=PlanConfig,
    base_name="plan_config",
    complete=with_max_seq_len,
)
