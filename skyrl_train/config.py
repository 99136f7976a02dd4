"""The configuration as the program reads it: frozen dataclasses with the keys of configs/ppo_base_config.yaml.

The YAML owns every value, so no field has a default. `main_config` reads a command line, `load_config` a list of
overrides, `from_hydra` what `@hydra.main` hands over; all three convert once, strictly, and raise ConfigError.
What reinforcement learning and supervised fine-tuning (config_sft.py) have in common is a class of its own here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_train.config_errors import ConfigError
from skyrl_train.config_program import Program, config_dir, to_yaml
from skyrl_train.config_values import (
    AboveZero,
    Bounds,
    Count,
    CountOrNever,
    CountOrZero,
    Decay,
    FolderText,
    NotNegative,
    OneOf,
    Port,
    SecretText,
    Share,
    ShareAboveZero,
    Text,
)

__all__ = ["RL", "Config", "ConfigError", "config_dir", "from_hydra", "load_config", "main_config", "to_yaml"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the prompts come from."""

    train_data: tuple[str, ...]
    """Files (parquet, json, jsonl) or `hub_name:split`."""
    val_data: tuple[str, ...]
    """The same, for evaluation; empty means no evaluation."""


@dataclass(frozen=True, kw_only=True)
class PolicyPlacementConfig:
    """How many policy ranks run where."""

    policy_num_nodes: Count
    """Times policy_num_gpus_per_node: the number of policy ranks; where they come to lie is `strategy`'s choice."""
    policy_num_gpus_per_node: Count
    """Policy ranks per node, also where there is no GPU."""
    cpus_per_worker: NotNegative
    """CPUs that Ray sets aside for each rank and engine."""
    strategy: Annotated[str, OneOf(("PACK", "SPREAD"))]
    """PACK fills a node first, SPREAD uses many nodes evenly."""
    timeout_s: AboveZero
    """Seconds that Ray has to find room."""


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
    """Traces of torch's profiler."""

    enable: bool
    """Whether to write any."""
    ranks: tuple[CountOrZero, ...]
    """Ranks that are traced."""
    steps: tuple[Count, ...]
    """Steps of this process that are traced, counted from 1 when it starts."""
    save_path: Text
    """Folder of the traces, on the rank's node; Perfetto and chrome://tracing show them."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Parallel layout and the switches of Megatron-core."""

    transformer_impl: Annotated[str, OneOf(("auto", "torch", "transformer_engine"))]
    """auto, torch or transformer_engine."""
    tensor_model_parallel_size: Count
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Count
    """Ranks that share the layers."""
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

    advantage_estimator: Annotated[str, OneOf(table=("advantages", "ADVANTAGES"))]
    """Name in algorithms/advantages.py."""
    grpo_norm_by_std: bool
    """Divide group-relative advantages by the group's standard deviation."""
    policy_loss_type: Annotated[str, OneOf(table=("losses", "LOSSES"))]
    """Name in algorithms/losses.py."""
    eps_clip_low: Share
    """The probability ratio is clipped at 1 - eps_clip_low."""
    eps_clip_high: NotNegative
    """The probability ratio is clipped at 1 + eps_clip_high."""
    clip_ratio_c: Annotated[float, Bounds(low=1, above=True)]
    """dual_clip: bound of ratio * |advantage| where the advantage is negative, above 1."""
    cispo: CispoConfig
    loss_reduction: Annotated[str, OneOf(table=("reductions", "REDUCTIONS"))]
    """Name in algorithms/reductions.py."""
    use_kl_loss: bool
    """Add the KL divergence from the reference to the loss."""
    use_kl_in_reward: bool
    """Take the KL divergence from the reference off the reward."""
    kl_estimator_type: Annotated[str, OneOf(table=("kl", "KL_ESTIMATORS"))]
    """Name in algorithms/kl.py."""
    kl_loss_coef: NotNegative
    """Weight of the KL term, in the loss or in the reward."""
    use_entropy_loss: bool
    """Take the entropy, weighted, off the loss."""
    entropy_loss_coef: NotNegative
    """Weight of the entropy term."""

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term with a weight asks for reference logprobs."""
        return (self.use_kl_loss or self.use_kl_in_reward) and self.kl_loss_coef != 0


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Of every run: sizes, intervals and what is written."""

    prepare: str | None
    """`module:function` that makes the model and data of an experiment if missing."""
    seed: CountOrZero
    """Of data order, engines and model initialisation."""
    project_name: Text
    """Weights & Biases project."""
    run_name: FolderText
    """Name of the run and of its folder."""
    run_dir: Text
    """Folder of everything that the run writes."""
    logger: tuple[Annotated[str, OneOf(("console", "jsonl", "tensorboard", "wandb"))], ...]
    """Any of console, jsonl, tensorboard, wandb."""
    epochs: Count
    """Passes over the training data."""
    max_training_steps: CountOrNever
    """Stop after this many steps; -1 means all of the epochs."""
    train_batch_size: Count
    """Prompts (rows, in supervised fine-tuning) per step."""
    max_tokens_per_microbatch: Count
    """Tokens of one forward pass of one rank."""
    eval_batch_size: Count
    """Prompts in flight during evaluation (rows of one pass, in supervised fine-tuning)."""
    eval_before_train: bool
    """Evaluate the model as it is before the first step."""
    eval_interval: CountOrNever
    """Steps between evaluations; -1 means never (the last step is always evaluated)."""
    hf_save_interval: CountOrNever
    """Steps between exports of a Hugging Face checkpoint; -1 means never."""
    export_path: Text
    """Folder of those exports."""
    timeout_s: AboveZero
    """Seconds that each remote call of a step has."""
    placement: PolicyPlacementConfig
    policy: PolicyConfig
    bf16: bool
    """dtype of the policy and reference: true bfloat16, false float32."""


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
    """Compare engine and trainer logprobs of fixed prompts at the first and each Nth sync; 0 means never."""
    ref: RefConfig
    algorithm: AlgorithmConfig

    @property
    def starts_reference(self) -> bool:
        """Whether the reference has processes of its own; with adapters it is the policy without them."""
        return self.algorithm.needs_reference and self.policy.model.lora.rank == 0


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn."""

    max_generate_length: Count
    """Most tokens of one turn."""
    temperature: NotNegative
    """0 means greedy."""
    top_p: ShareAboveZero
    """Draw from the most likely tokens that together have this probability."""
    top_k: CountOrNever
    """Draw from this many of the most likely tokens; -1 means all."""
    min_p: Share
    """Leave out tokens less likely than this share of the likeliest."""
    stop: tuple[str, ...]
    """Strings that end a turn."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """The vLLM engines and what they are asked for."""

    run_engines_locally: bool
    """Start the engines; false connects to the vLLM servers of remote_inference_engine_urls."""
    remote_inference_engine_urls: tuple[str, ...]
    """Servers that run already, as http://host:port; with run_engines_locally=false."""
    remote_api_key_env: Text | None
    """Environment variable with the API key of those servers; null means that they have none."""
    num_inference_engines: Count
    """Engines side by side."""
    inference_engine_tensor_parallel_size: Count
    """Ranks of each engine."""
    model_dtype: Annotated[str, OneOf(("bfloat16", "float16", "float32"))]
    """dtype of the engines' weights: bfloat16, float16 or float32."""
    enforce_eager: bool
    """No CUDA graphs and no compilation."""
    enable_prefix_caching: bool
    """Samples of one prompt share its computation."""
    gpu_memory_utilization: ShareAboveZero | None
    """Share of the device's memory that an engine takes; null means what is free when it starts, but for a margin."""
    kv_cache_memory_gb: AboveZero | None
    """GiB of the KV cache; null means what gpu_memory_utilization leaves. Needed without a GPU."""
    max_num_batched_tokens: Count
    """Tokens of one engine step."""
    max_num_seqs: Count
    """Sequences in flight in one engine."""
    max_input_length: Count
    """Tokens before a turn; a longer conversation ends."""
    max_turns: Count
    """Turns of one sample."""
    n_samples_per_prompt: Count
    """Samples of one group."""
    eval_n_samples_per_prompt: Count
    """Samples per prompt in evaluation."""
    engine_init_kwargs: dict[str, Any]
    """Passed to vLLM's engine arguments as they are."""
    chat_template_kwargs: dict[str, Any]
    """Passed to the tokenizer's chat template."""
    weight_sync_backend: Annotated[str, OneOf(("auto", "shm", "broadcast", "cuda_ipc", "vllm_nccl"))]
    """auto, shm, broadcast, cuda_ipc (policy and engines on the same GPUs), or vllm_nccl for stock vLLM servers."""
    weight_sync_bucket_mb: Count
    """MiB of one packed bucket of weights."""
    pause_mode: Annotated[str, OneOf(("keep", "wait", "abort"))]
    """What a weight sync does to running requests: keep freezes them, wait lets them end, abort cuts them off."""
    enable_http_endpoint: bool
    """Offer each engine over HTTP, as vLLM's OpenAI-compatible API."""
    http_endpoint_host: Text
    """Address to listen on; any but this computer's own (127.0.0.1) needs http_api_key."""
    http_endpoint_port: Port
    """Port of engine 0, the next ones follow; 0 means any free ports."""
    http_api_key: SecretText | None = field(repr=False)
    """What clients send as `Authorization: Bearer KEY`; `${oc.env:NAME}` takes it from the environment."""
    served_model_name: Text | None
    """Name of the model over HTTP, with and without `@VERSION`; null means trainer.run_name."""
    weight_sync_timeout_s: AboveZero
    """Deadline in seconds of each call of a weight sync; an engine that does not answer by then is given up."""
    max_engine_restarts: Annotated[int, Bounds(low=0)]
    """Times in a row that a lost engine is replaced."""
    sampling_params: SamplingConfig
    eval_sampling_params: SamplingConfig


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
    step_timeout_s: AboveZero
    """Seconds that one env.init, env.step or env.close has."""
    skyrl_gym: SkyrlGymConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the configurations of all programs that train have."""

    data: DataConfig
    trainer: TrainingConfig


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
