"""The keys of trainer.algorithm: frozen dataclasses without defaults, which the YAML owns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, REDUCTIONS, reads_values
from skyrl_train.config.schema import key_types
from skyrl_train.config.values import AboveZero, Bounds, Count, CountOrNever, NotNegative, OneOf, Share, Text


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
        """Leaf name -> value of every key, for the keyword-only parameters of functions, and name -> section. A key of
        another name than all in PLACES may be in `parameters`.
        """
        fields = dataclasses.asdict(self)
        values = fields.pop("parameters")
        for name, value in fields.items():
            if dataclasses.is_dataclass(getattr(self, name)):
                own = values.get(name)
                values |= value | {name: {**own, **value} if isinstance(own, dict) else value}
            else:
                values[name] = value
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


PLACES = {key.rpartition(".")[2]: key for key in key_types(AlgorithmConfig)}
"""Leaf name of every key -> the key."""
