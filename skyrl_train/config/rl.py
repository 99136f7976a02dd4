"""The configuration of reinforcement learning: frozen dataclasses with the keys of configs/ppo_base_config.yaml.

The YAML owns every value, so no field has a default. `main_config` reads a command line, `load_config` a list of
overrides, `from_hydra` what `@hydra.main` hands over; all three convert once, strictly, and raise ConfigError.
Keys of models, of every run and of engines stand in `policy.py`, `training.py` and `generator.py`; here are those
of the environments and of the algorithm, and the whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, REDUCTIONS
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import RefConfig, SyncedPolicyConfig
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
    """How many ranks run where."""

    colocate_all: bool
    """Policy, reference and engines take turns on the same devices."""
    release: Annotated[str, OneOf(("offload", "exit", "none"))]
    """With colocate_all, what trainers do out of their turn: offload, exit or none."""
    state_path: Text
    """With release=exit, the folder of the trainers' state between their turns."""
    ref_num_nodes: Count
    """Times ref_num_gpus_per_node: the number of reference ranks."""
    ref_num_gpus_per_node: Count
    """Reference ranks per node, also where there is no GPU."""


@dataclass(frozen=True, kw_only=True)
class CispoConfig:
    """Clipped importance weights."""

    cispo_eps_clip_low: NotNegative
    """The importance weight is clipped at 1 - cispo_eps_clip_low."""
    cispo_eps_clip_high: NotNegative
    """The importance weight is clipped at 1 + cispo_eps_clip_high."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """From rewards to a loss."""

    advantage_estimator: Annotated[str, ADVANTAGES]
    """A name of algorithms/tables.py, or module:attribute."""
    grpo_norm_by_std: bool
    """Divide group-relative advantages by the group's standard deviation."""
    policy_loss_type: Annotated[str, LOSSES]
    """A name of algorithms/tables.py, or module:attribute."""
    eps_clip_low: Share
    """The probability ratio is clipped at 1 - eps_clip_low."""
    eps_clip_high: NotNegative
    """The probability ratio is clipped at 1 + eps_clip_high."""
    clip_ratio_c: Annotated[float, Bounds(low=1, above=True)]
    """dual_clip: bound of ratio * |advantage| where the advantage is negative, above 1."""
    cispo: CispoConfig
    corrections: tuple[Annotated[str, CORRECTIONS], ...]
    """Corrections between engine and trainer, applied to the policy's loss: names of algorithms/tables.py."""
    token_tis_ratio_clip_high: AboveZero
    """token_tis: largest importance weight."""
    icepop_low: NotNegative
    """icepop: smallest importance weight that is trained."""
    icepop_high: AboveZero
    """icepop: largest importance weight that is trained."""
    loss_reduction: Annotated[str, REDUCTIONS]
    """A name of algorithms/tables.py, or module:attribute."""
    use_kl_loss: bool
    """Add the KL divergence from the reference to the loss."""
    use_kl_in_reward: bool
    """Take the KL divergence from the reference off the reward."""
    kl_estimator_type: Annotated[str, KL_ESTIMATORS]
    """A name of algorithms/tables.py, or module:attribute."""
    kl_loss_coef: NotNegative
    """Weight of the KL term, in the loss or in the reward."""
    kl_loss_reduction: Annotated[str, REDUCTIONS] | None
    """Reduction of the KL term; null: loss_reduction."""
    use_entropy_loss: bool
    """Take the entropy, weighted, off the loss."""
    entropy_loss_coef: NotNegative
    """Weight of the entropy term."""
    entropy_loss_reduction: Annotated[str, REDUCTIONS] | None
    """Reduction of the entropy term; null: loss_reduction."""
    parameters: dict[str, Any]
    """Values of the keyword-only parameters of your own functions, by name."""

    @property
    def values(self) -> dict[str, Any]:
        """Leaf name -> value of every key: where functions get their keyword-only parameters from."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("parameters"), **fields.pop("cispo"), **fields}

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term with a weight asks for reference logprobs."""
        return (self.use_kl_loss or self.use_kl_in_reward) and self.kl_loss_coef != 0


@dataclass(frozen=True, kw_only=True)
class LogprobDifferenceConfig:
    """Bounds on the mean |engine - trainer| logprob difference of a step's samples, before the update."""

    warn: AboveZero | None
    """Nats above which a step warns, once in a run; null: what rounding of the dtype makes (docs/exactness.md)."""
    fail: AboveZero | None
    """Nats above which the run ends before the step is trained; null: 10 times warn."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainingConfig):
    """The run: sizes, intervals and what is written."""

    placement: PlacementConfig
    policy: SyncedPolicyConfig
    policy_mini_batch_size: Count
    """Prompts per optimizer step."""
    update_epochs_per_batch: Count
    """Times each step's samples are trained on."""
    max_prompt_length: Count
    """Tokens; rows with longer prompts are dropped."""
    log_samples_interval: CountOrNever
    """Steps between sample transcripts; -1 means never."""
    num_logged_samples: CountOrZero
    """Transcripts written each time."""
    verify_sync_every: CountOrZero
    """Compare engine and trainer logprobs of fixed samples before the first update and at the first and each Nth sync;
    0 means never."""
    logprob_difference: LogprobDifferenceConfig
    custom_modules: tuple[Text, ...]
    """Modules of yours that are imported before names are looked up, and may register losses and estimators."""
    ref: RefConfig
    source: Text
    """Where the groups of a step come from: on_policy, or `module:attribute` of the user's own (docs/extending.md)."""
    algorithm: AlgorithmConfig

    @property
    def starts_reference(self) -> bool:
        """Whether the reference has processes of its own; with adapters it is the policy without them."""
        return self.algorithm.needs_reference and self.policy.model.lora.rank == 0


@dataclass(frozen=True, kw_only=True)
class SkyrlGymConfig:
    """skyrl-gym environments."""

    max_env_workers: Count
    """Environment calls that run at once."""
    env_kwargs: dict[str, Any]
    """env_class -> settings handed to its environment as env_config."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What scores the responses."""

    env_class: Text
    """For rows without an env_class: a name of skyrl-gym's registry or `module:Class`."""
    allowed_env_classes: tuple[Text, ...]
    """`module:Class` names that rows may import besides env_class; rows may always name skyrl-gym's registry."""
    step_timeout_s: AboveZero
    """Seconds that one env.init, env.step or env.close has."""
    skyrl_gym: SkyrlGymConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The whole configuration."""

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
