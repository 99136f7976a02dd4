"""Keys of the engines. configs/ppo_base_config.yaml says what each key means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_train.config.values import (
    AboveZero,
    Bounds,
    Count,
    CountOrNever,
    CountOrZero,
    NotNegative,
    OneOf,
    Port,
    SecretText,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Text,
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling parameters."""

    max_generate_length: Count
    temperature: NotNegative
    top_p: ShareAboveZero
    top_k: CountOrNever
    min_p: Share
    stop: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """The vLLM engines: how they run, sample and receive weights."""

    backend: Text
    run_engines_locally: bool
    remote_inference_engine_urls: tuple[str, ...]
    remote_api_key_env: Text | None
    num_inference_engines: Count
    eval_num_engines: CountOrZero
    inference_engine_tensor_parallel_size: Count
    model_dtype: Annotated[str, OneOf(("bfloat16", "float16", "float32"))]
    quantization: Annotated[str, OneOf(("fp8",))] | None
    enforce_eager: bool | None
    seed_requests: bool | None
    enable_prefix_caching: bool
    gpu_memory_utilization: ShareAboveZero | None
    kv_cache_memory_gb: AboveZero | None
    max_num_batched_tokens: Count | None
    max_num_seqs: Count | None
    max_input_length: Count
    max_turns: Count
    use_conversation_multi_turn: bool
    step_wise_trajectories: bool
    n_samples_per_prompt: Count
    rollout: Text | None
    max_failed_share: ShareBelowOne
    zero_reward_on_non_stop: bool
    apply_overlong_filtering: bool
    eval_n_samples_per_prompt: Count
    engine_init_kwargs: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    weight_sync_backend: Text
    weight_sync_bucket_mb: Count
    pause_mode: Annotated[str, OneOf(("keep", "wait", "abort"))]
    recompute_kv_cache: bool
    enable_http_endpoint: bool
    http_endpoint_host: Text
    http_endpoint_port: Port
    http_api_key: SecretText | None = field(repr=False)
    served_model_name: Text | None
    weight_sync_timeout_s: AboveZero
    max_engine_restarts: Annotated[int, Bounds(low=0)]
    sampling_params: SamplingConfig
    eval_sampling_params: SamplingConfig

    @property
    def num_engines(self) -> int:
        """Number of engines that are started, or of running servers."""
        return self.num_inference_engines if self.run_engines_locally else len(self.remote_inference_engine_urls)

    @property
    def num_rollout_engines(self) -> int:
        """Number of engines that generate the samples of training; the others are reserved for evaluation."""
        return self.num_engines - self.eval_num_engines

    @property
    def step_tokens(self) -> int:
        """Maximum tokens per engine step, also if nothing was chosen."""
        return self.max_num_batched_tokens or 8_192

    @property
    def step_sequences(self) -> int:
        """Maximum sequences in flight per engine, also if nothing was chosen."""
        return self.max_num_seqs or 1_024

    @property
    def longest_conversation(self) -> int:
        """Tokens of the longest conversation of training or evaluation."""
        sampled = self.sampling_params.max_generate_length, self.eval_sampling_params.max_generate_length
        return self.max_input_length + max(sampled)
