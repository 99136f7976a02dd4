"""Keys of the models. configs/ppo_base_config.yaml says what each key means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.config.values import AboveZero, Bounds, Count, CountOrZero, Decay, NotNegative, OneOf, Share, Text

OWN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments of Megatron's TransformerConfig that assign layers to pipeline stages."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    path: Text


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA adapters (arXiv:2106.09685), trained instead of the model's weights."""

    rank: CountOrZero
    alpha: AboveZero
    dropout: Annotated[float, Bounds(low=0, high=1, below=True)]
    target_modules: tuple[Text, ...]
    exclude_modules: tuple[Text, ...] | None
    init_method: Annotated[str, OneOf(("kaiming", "xavier", "normal"))]
    path: str | None


@dataclass(frozen=True, kw_only=True)
class SyncedLoraConfig(LoraConfig):
    """LoRA adapters (arXiv:2106.09685), trained instead of the model's weights and synced to the engines."""

    sync: Annotated[str, OneOf(("merged", "adapter"))]


@dataclass(frozen=True, kw_only=True)
class PolicyModelConfig(ModelConfig):
    """The trained model."""

    lora: LoraConfig


@dataclass(frozen=True, kw_only=True)
class SyncedModelConfig(PolicyModelConfig):
    """The trained model, which the engines serve."""

    lora: SyncedLoraConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam and the learning-rate schedule."""

    lr: NotNegative
    adam_betas: tuple[Decay, Decay]
    adam_eps: AboveZero
    weight_decay: NotNegative
    max_grad_norm: NotNegative
    scheduler: Annotated[str, OneOf(("constant_with_warmup", "linear", "cosine"))]
    num_warmup_steps: CountOrZero
    min_lr_ratio: Share


@dataclass(frozen=True, kw_only=True)
class TorchProfilerConfig:
    """Traces of torch's profiler and snapshots of device memory, for chosen ranks and steps."""

    enable: bool
    record_memory: bool
    ranks: tuple[CountOrZero, ...]
    steps: tuple[Count, ...]
    save_path: Text


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of a parallel layout."""

    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Annotated[int, Bounds(low=2)] | None
    context_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count | None


RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "mlp_act", "moe", "shared_experts")
"""Megatron-core's names of what `recompute_granularity=selective` can recompute, and the activation of dense layers."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(ParallelSizes):
    """Parallel layout and settings of Megatron-core."""

    transformer_impl: Annotated[str, OneOf(("auto", "torch", "transformer_engine"))]
    sequence_parallel: bool
    recompute_granularity: Annotated[str, OneOf(("auto", "selective", "full"))] | None
    recompute_modules: tuple[Annotated[str, OneOf(RECOMPUTABLE)], ...] | None
    recompute_num_layers: Count | None
    recompute_logits: bool | None
    logprobs_chunk_size: Count | None
    optimizer_cpu_offload: bool
    moe_aux_loss_coeff: NotNegative
    freeze_moe_router: bool
    transformer_config_kwargs: dict[str, Any]
    torch_profiler_config: TorchProfilerConfig

    @property
    def recompute(self) -> str | None:
        """`recompute_granularity`, also if nothing was chosen."""
        return None if self.recompute_granularity == "auto" else self.recompute_granularity

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Modules that are recomputed with `selective`; none otherwise."""
        modules = ("core_attn",) if self.recompute_modules is None else self.recompute_modules
        return modules if self.recompute == "selective" else ()

    def num_recomputed(self, layers: int) -> int:
        """Layers that are recomputed whole, the first of a model chunk of as many layers."""
        most = layers if self.recompute_num_layers is None else self.recompute_num_layers
        return min(layers, most) if self.recompute == "full" else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel layout of a model's ranks."""

    megatron: MegatronConfig
    num_ranks: int

    @property
    def tp(self) -> int:
        return self.megatron.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.megatron.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        """Model chunks per pipeline rank."""
        return self.megatron.virtual_pipeline_model_parallel_size or 1

    @property
    def cp(self) -> int:
        return self.megatron.context_parallel_size

    @property
    def ep(self) -> int:
        return self.megatron.expert_model_parallel_size

    @property
    def etp(self) -> int:
        return self.megatron.expert_tensor_parallel_size or self.tp

    @property
    def dp(self) -> int:
        return self.num_ranks // (self.tp * self.pp * self.cp)

    @property
    def sp(self) -> int:
        """Ranks that share activations along the sequence."""
        return self.tp if self.megatron.sequence_parallel else 1

    @property
    def sizes(self) -> str:
        """Sizes above 1, such as `TP2 DP2`; ETP if it is not TP."""
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "EP": self.ep, "DP": self.dp}
        named = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return " ".join(named + [f"ETP{self.etp}"] * (self.etp != self.tp)) or "one process"

    def __str__(self) -> str:
        recompute, num = self.megatron.recompute, self.megatron.recompute_num_layers
        what = f"{num} layers" if recompute == "full" and num is not None else recompute
        return self.sizes + (f", recompute {what}" if what else "")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The trained model."""

    model: PolicyModelConfig
    optimizer_config: OptimizerConfig
    megatron_config: MegatronConfig


@dataclass(frozen=True, kw_only=True)
class SyncedPolicyConfig(PolicyConfig):
    """The trained model, which the engines serve."""

    model: SyncedModelConfig


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of estimators that read values; not started without one."""

    model: ModelConfig
    optimizer_config: OptimizerConfig
    megatron_config: MegatronConfig


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A model besides the policy, with its own ranks, which score every token of a step: frozen, or the critic."""

    name: str
    """In logs, metrics and messages, such as reference."""
    signal: str
    """Field of TokenInputs that its logprobs become; for a teacher its name, since it gives several fields."""
    section: str
    """Its keys are below `trainer.{section}`."""
    path_key: str
    model_path: str
    megatron_config: MegatronConfig
    num_ranks: int
    data_sources: tuple[str, ...] | None = None
    """Data sources of the prompts whose samples it scores; None for all."""

    @property
    def key(self) -> str:
        return f"trainer.{self.section}"

    @property
    def ranks_key(self) -> str:
        """Keys whose product is num_ranks."""
        return f"trainer.placement.{self.section}_num_nodes * {self.section}_num_gpus_per_node"

    @property
    def is_teacher(self) -> bool:
        return self.section == "teacher"

    @property
    def is_trained(self) -> bool:
        """Whether it is the critic."""
        return self.signal == "values"


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen reference model of the KL term; not started without one."""

    model: ModelConfig
    megatron_config: MegatronConfig


@dataclass(frozen=True, kw_only=True)
class TeacherModelConfig:
    """One model, or one for each data source."""

    path: Text | None
    path_of_data_source: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Model that the policy learns from (algorithm.distillation): a frozen one if there is a path, or itself."""

    backend: Annotated[str, OneOf(("megatron", "policy", "engine", "remote"))]
    num_inference_engines: Count
    inference_engine_tensor_parallel_size: Count
    model: TeacherModelConfig
    megatron_config: MegatronConfig

    @property
    def is_there(self) -> bool:
        """Whether anything scores the samples as a teacher."""
        return self.backend == "policy" or self.model.path is not None or bool(self.model.path_of_data_source)

    @property
    def is_served(self) -> bool:
        """Whether engines or running servers score the samples."""
        return self.backend in ("engine", "remote")

    def models(self, num_ranks: int) -> tuple[ScoringModel, ...]:
        """One for each distinct path; num_ranks: of each that has its own ranks."""
        if self.backend == "policy":
            return ()
        default, key = self.model.path, "trainer.teacher.model"
        sources: dict[str, tuple[str, ...] | None] = {} if default is None else {default: None}
        for source, path in self.model.path_of_data_source.items():
            if path != default:
                sources[path] = (*(sources.get(path) or ()), source)
        names = ["teacher"] if len(sources) == 1 else [f"teacher_{number}" for number in range(len(sources))]
        return tuple(
            ScoringModel(
                name=name,
                signal=name,
                section="teacher",
                path_key=f"{key}.path" if own is None else f"{key}.path_of_data_source.{own[0]}",
                model_path=path,
                megatron_config=self.megatron_config,
                num_ranks=num_ranks,
                data_sources=own,
            )
            for name, (path, own) in zip(names, sources.items(), strict=True)
        )
