"""The keys of the engines: how they run, how they sample, and how they get weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from skyrl_train.config.values import (
    AboveZero,
    Bounds,
    Count,
    CountOrNever,
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

    backend: Text
    """Kind of the engines that are started: vllm, or `module:Class` of your own (skyrl_train/engines/protocol.py)."""
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
    enforce_eager: bool | None
    """No CUDA graphs and no compilation; null means CUDA graphs on GPUs and eager mode without a GPU."""
    seed_requests: bool | None
    """A seed for each request, so that a sampled run repeats; null means true without a GPU and false on GPUs."""
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
    """Rollouts of each prompt; their samples are one group."""
    rollout: Text | None
    """`module:function` that makes the samples of a prompt (docs/extending.md); null plays the prompt's environment."""
    max_failed_share: ShareBelowOne
    """Fraction of a step's rollouts that may fail; their groups are trained without them. 0: the first ends the run."""
    eval_n_samples_per_prompt: Count
    """Samples per prompt in evaluation."""
    engine_init_kwargs: dict[str, Any]
    """Passed to vLLM's engine arguments as they are."""
    chat_template_kwargs: dict[str, Any]
    """Passed to the tokenizer's chat template."""
    weight_sync_backend: Text
    """auto, or one of weight_sync/channels/table.py: shm, broadcast, cuda_ipc (policy and engines on the same GPUs), or
    vllm_nccl for stock vLLM servers; or `module:attribute` of a Transport of your own (docs/extending.md)."""
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

    @property
    def longest_conversation(self) -> int:
        """Tokens of the longest conversation that training or evaluation may ask an engine for."""
        sampled = self.sampling_params.max_generate_length, self.eval_sampling_params.max_generate_length
        return self.max_input_length + max(sampled)
