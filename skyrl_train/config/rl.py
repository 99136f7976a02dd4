"""The configuration of reinforcement learning: frozen dataclasses with the keys of configs/ppo_base_config.yaml.

The YAML owns every value and comment, so no field has a default. `main_config` reads a command line, `load_config` a
list of overrides, `from_hydra` the configuration of `@hydra.main`; all raise ConfigError.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, REDUCTIONS, reads_values
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import CriticConfig, RefConfig, ScoringModel, SyncedPolicyConfig, TeacherConfig
from skyrl_train.config.program import Program
from skyrl_train.config.training import PolicyPlacementConfig, RunConfig, TrainingConfig
from skyrl_train.config.values import (
    AboveZero,
    Bounds,
    Count,
    CountOrNever,
    CountOrZero,
    NotNegative,
    OneOf,
    Share,
    Text,
)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(PolicyPlacementConfig):
    """Devices and processes."""

    colocate_all: bool
    release: Annotated[str, OneOf(("offload", "exit", "none"))]
    state_path: Text
    ref_num_nodes: Count
    ref_num_gpus_per_node: Count
    critic_num_nodes: Count
    critic_num_gpus_per_node: Count
    teacher_num_nodes: Count
    teacher_num_gpus_per_node: Count

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
class CispoConfig:
    """Bounds of the importance weights of cispo."""

    cispo_eps_clip_low: NotNegative
    cispo_eps_clip_high: NotNegative


@dataclass(frozen=True, kw_only=True)
class SapoConfig:
    """Temperatures of the soft gate of sapo."""

    tau_pos: AboveZero
    tau_neg: AboveZero


@dataclass(frozen=True, kw_only=True)
class DppoConfig:
    """Trust region on probabilities of dppo."""

    dppo_type: Annotated[str, OneOf(("binary_tv", "binary_kl"))]
    delta_low: AboveZero
    delta_high: AboveZero


@dataclass(frozen=True, kw_only=True)
class VespoConfig:
    """Shape of the weight of a sample in vespo."""

    vespo_k_pos: NotNegative
    vespo_lambda_pos: NotNegative
    vespo_k_neg: NotNegative
    vespo_lambda_neg: NotNegative


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig:
    """Tokens that clip_cov leaves out."""

    clip_ratio: Share
    clip_cov_lb: float
    clip_cov_ub: float


@dataclass(frozen=True, kw_only=True)
class KlCovConfig:
    """Tokens that kl_cov penalises."""

    kl_cov_frac: Share
    ppo_kl_coef: NotNegative


@dataclass(frozen=True, kw_only=True)
class OffPolicyCorrectionConfig:
    """Bounds of the corrections. w is the trainer's probability of a token divided by the engine's."""

    token_tis_ratio_clip_high: AboveZero
    sequence_tis_ratio_clip_high: AboveZero
    icepop_low: NotNegative
    icepop_high: AboveZero
    token_mask_is_threshold_low: NotNegative
    token_mask_is_threshold_high: AboveZero
    geo_mask_low: NotNegative
    geo_mask_high: AboveZero
    product_mask_low: NotNegative
    product_mask_high: AboveZero
    outlier_token_is_threshold_low: NotNegative
    outlier_token_is_threshold_high: AboveZero
    opsm_delta: NotNegative


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig:
    """Soft punishment of long responses."""

    len: Count | None
    penalty_factor: NotNegative


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """What happens to groups whose samples all have the same reward."""

    type: Annotated[str, OneOf(("filter", "replace"))] | None
    max_sample_batches: CountOrNever
    min_replace_ratio: Share


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How the policy learns from trainer.teacher."""

    distillation_type: Annotated[str, OneOf(("advantage", "loss", "topk_forward", "topk_reverse"))] | None
    distillation_coef: NotNegative
    distillation_kl_estimator: Annotated[str, KL_ESTIMATORS]
    distillation_topk: Count
    distillation_reduction: Annotated[str, REDUCTIONS] | None
    distillation_hint: Text | None


@dataclass(frozen=True, kw_only=True)
class KlControlConfig:
    """Controller of the weight of the KL penalty in the reward."""

    type: Annotated[str, OneOf(("fixed", "adaptive"))]
    kl_target: AboveZero
    horizon: Count


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropyConfig:
    """Controller of the weight of the entropy term."""

    target_entropy: NotNegative | None
    delta: AboveZero


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Settings of the RL algorithm."""

    advantage_estimator: Annotated[str, ADVANTAGES]
    grpo_norm_by_std: bool
    gdpo_reward_weights: dict[str, Any]
    gamma: Share
    lambd: Share
    value_clip: AboveZero | None
    value_head_prefix: Text
    value_loss_reduction: Annotated[str, REDUCTIONS] | None
    advantage_batch_normalize: bool
    policy_loss_type: Annotated[str, LOSSES]
    eps_clip_low: Share
    eps_clip_high: NotNegative
    clip_ratio_c: Annotated[float, Bounds(low=1, above=True)]
    cispo: CispoConfig
    sapo: SapoConfig
    dppo: DppoConfig
    vespo: VespoConfig
    clip_cov: ClipCovConfig
    kl_cov: KlCovConfig
    corrections: tuple[Annotated[str, CORRECTIONS], ...]
    prox_logp_method: Annotated[str, OneOf(("recompute", "loglinear"))]
    top_entropy_quantile: Share
    off_policy_correction: OffPolicyCorrectionConfig
    overlong_buffer: OverlongBufferConfig
    zero_variance_filter: bool
    dynamic_sampling: DynamicSamplingConfig
    loss_reduction: Annotated[str, REDUCTIONS]
    use_kl_loss: bool
    use_kl_in_reward: bool
    kl_estimator_type: Annotated[str, KL_ESTIMATORS]
    use_unbiased_kl: bool
    use_corrected_kl: bool
    kl_loss_coef: NotNegative
    kl_ctrl: KlControlConfig
    kl_loss_reduction: Annotated[str, REDUCTIONS] | None
    use_entropy_loss: bool
    entropy_loss_coef: NotNegative
    adaptive_entropy: AdaptiveEntropyConfig
    entropy_loss_reduction: Annotated[str, REDUCTIONS] | None
    distillation: DistillationConfig
    parameters: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Leaf name -> value of every key, for the keyword-only parameters of functions."""
        fields = dataclasses.asdict(self)
        values = fields.pop("parameters")
        for name, value in fields.items():
            values |= value if dataclasses.is_dataclass(getattr(self, name)) else {name: value}
        return values

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads values."""
        return reads_values(self.advantage_estimator)

    @property
    def has_adaptive_entropy(self) -> bool:
        """Whether the weight of the entropy term changes between steps."""
        return self.use_entropy_loss and self.adaptive_entropy.target_entropy is not None

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term with a weight reads reference logprobs."""
        return (self.use_kl_loss or self.use_kl_in_reward) and self.kl_loss_coef != 0


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
        """Models with processes of their own that score each step; with LoRA the reference is the policy without
        adapters, and so is a teacher of the same path."""
        has_reference = self.algorithm.needs_reference and self.policy.model.lora.rank == 0
        reference = [self.ref.frozen_model(self.placement.num_ref_ranks)] if has_reference else []
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
    def _teachers(self) -> tuple[ScoringModel, ...]:
        return self.teacher.models(self.placement.num_teacher_ranks)

    @property
    def scoring_models(self) -> tuple[ScoringModel, ...]:
        """Models with processes of their own besides the policy: frozen ones, and the critic as the last."""
        if not self.algorithm.needs_critic:
            return self.frozen_models
        critic = ScoringModel(
            name="critic",
            signal="values",
            key="trainer.critic",
            path_key="trainer.critic.model.path",
            model_path=self.critic.model.path,
            megatron_config=self.critic.megatron_config,
            num_ranks=self.placement.num_critic_ranks,
            ranks_key="trainer.placement.critic_num_nodes * critic_num_gpus_per_node",
        )
        return (*self.frozen_models, critic)


@dataclass(frozen=True, kw_only=True)
class SkyrlGymConfig:
    """skyrl-gym environments."""

    max_env_workers: Count
    env_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """The environments that score the responses."""

    env_class: Text
    pass_threshold: float
    allowed_env_classes: tuple[Text, ...]
    step_timeout_s: AboveZero
    skyrl_gym: SkyrlGymConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The configuration of reinforcement learning."""

    trainer: TrainerConfig
    generator: GeneratorConfig
    environment: EnvironmentConfig


RL = Program(
    module="skyrl_train.entrypoints.main_base",
    purpose="Train a language model by reinforcement learning.",
    schema=Config,
    base_name="ppo_base_config",
)
load_config, main_config, from_hydra = RL.load, RL.read, RL.from_hydra
