"""The keys of the models: what is trained (whole or with adapters), how, and in which parallel layout."""

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
"""Settings of Megatron's TransformerConfig that say which layers lie on which stage."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model."""

    path: Text
    """Folder or hub name of a Hugging Face checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters (arXiv:2106.09685) that are trained instead of the model's weights."""

    rank: CountOrZero
    """Rank of the adapters; 0 trains the model itself."""
    alpha: AboveZero
    """The adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Bounds(low=0, high=1, below=True)]
    """Share of the adapter's input that training leaves out."""
    target_modules: tuple[Text, ...]
    """`all-linear`, or names of modules, ends of names, or regular expressions."""
    exclude_modules: tuple[Text, ...] | None
    """The same, for what target_modules should leave out."""
    init_method: Annotated[str, OneOf(("kaiming", "xavier", "normal"))]
    """How A starts, kaiming, xavier or normal; B starts at zero."""
    path: str | None
    """Folder with an adapter in PEFT's format to start from; null starts from one that changes nothing."""


@dataclass(frozen=True, kw_only=True)
class SyncedLoraConfig(LoraConfig):
    """Adapters that engines get, too."""

    sync: Annotated[str, OneOf(("merged", "adapter"))]
    """merged sends the engines weights with the adapter folded in, adapter sends the adapter itself."""


@dataclass(frozen=True, kw_only=True)
class PolicyModelConfig(ModelConfig):
    """The model that is trained, and whether as a whole."""

    lora: LoraConfig


@dataclass(frozen=True, kw_only=True)
class SyncedModelConfig(PolicyModelConfig):
    """The model that is trained and that engines serve."""

    lora: SyncedLoraConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam and its schedule."""

    lr: NotNegative
    """Highest learning rate."""
    adam_betas: tuple[Decay, Decay]
    """Decay of the first and second moment."""
    adam_eps: NotNegative
    """Added to the root of the second moment."""
    weight_decay: NotNegative
    """Decoupled (AdamW)."""
    max_grad_norm: NotNegative
    """Gradients are scaled down to this global 2-norm."""
    scheduler: Annotated[str, OneOf(("constant_with_warmup", "linear", "cosine"))]
    """constant_with_warmup, linear or cosine."""
    num_warmup_steps: CountOrZero
    """Optimizer steps from 0 to lr."""
    min_lr_ratio: Share
    """Learning rate at the end of linear and cosine, as a share of lr."""


@dataclass(frozen=True, kw_only=True)
class TorchProfilerConfig:
    """Traces of torch's profiler and snapshots of device memory, of chosen ranks and steps."""

    enable: bool
    """Whether to write traces; Perfetto and chrome://tracing show them."""
    record_memory: bool
    """Whether to write snapshots of a GPU's memory, also of a step that runs out of it, for pytorch.org/memory_viz."""
    ranks: tuple[CountOrZero, ...]
    """Ranks that write them."""
    steps: tuple[Count, ...]
    """Steps of this process that are written, counted from 1 when it starts."""
    save_path: Text
    """Folder of the files, on the rank's node."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Parallel layout and the switches of Megatron-core."""

    transformer_impl: Annotated[str, OneOf(("auto", "torch", "transformer_engine"))]
    """auto, torch or transformer_engine; auto means the last where it is installed and the model is bfloat16."""
    tensor_model_parallel_size: Count
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Count
    """Ranks that share the layers; the last, with the output layer, has fewer."""
    virtual_pipeline_model_parallel_size: Annotated[int, Bounds(low=2)] | None
    """Model chunks per pipeline rank (interleaved schedule); null means one, without interleaving."""
    context_parallel_size: Count
    """Ranks that share each sequence."""
    expert_model_parallel_size: Count
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Count | None
    """Ranks that share each expert's matrices; null means tensor_model_parallel_size."""
    sequence_parallel: bool
    """With tensor parallelism, split activations along the sequence too."""
    recompute_granularity: Annotated[str, OneOf(("selective", "full"))] | None
    """null, selective or full: which activations are computed again in backward."""
    recompute_modules: tuple[str, ...]
    """Modules that selective recomputes."""
    logprobs_chunk_size: Count
    """Positions whose float32 logits exist at a time."""
    moe_aux_loss_coeff: NotNegative
    """Weight of the load-balancing loss of mixture-of-experts models."""
    freeze_moe_router: bool
    """Leave the routers of mixture-of-experts models as they are."""
    transformer_config_kwargs: dict[str, Any]
    """Passed to Megatron's TransformerConfig as they are."""
    torch_profiler_config: TorchProfilerConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model that is trained."""

    model: PolicyModelConfig
    optimizer_config: OptimizerConfig
    megatron_config: MegatronConfig


@dataclass(frozen=True, kw_only=True)
class SyncedPolicyConfig(PolicyConfig):
    """The model that is trained and that engines serve."""

    model: SyncedModelConfig


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen model of the KL term; not started where there is none."""

    model: ModelConfig
    megatron_config: MegatronConfig
