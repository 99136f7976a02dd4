"""Memory of a vLLM engine's worker by the rules of engines/vllm/memory.py, and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from skyrl_train.cluster.sharing import build_sharing
from skyrl_train.config import Config
from skyrl_train.device.nvml import DeviceUse
from skyrl_train.engines.settings import NUM_BYTES
from skyrl_train.engines.vllm.memory import BLOCK, MAX_CACHE_FRACTION, ModelSize, memory_fraction
from skyrl_train.forecast.parts import ESTIMATED, EXACT, GIB, GUESSED, Part
from skyrl_train.forecast.readings import Readings
from skyrl_train.hf.matrices import expert_width, head_sizes, is_latent, num_experts, num_parameters

BYTES_PER_SAMPLED_LOGIT = 10
"""A logit of an engine step in half precision, and two float32 copies."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """A worker of an engine."""

    parts: tuple[Part, ...]
    sequences: float
    """Longest sequences that the KV cache holds at once."""


def engine_memory(
    config: Config, model: PretrainedConfig, capacity: float, left: float, readings: Readings
) -> EngineMemory:
    """Args: capacity: bytes of the device; left: bytes that trainers keep on it while the engine starts."""
    generator, sharing = config.generator, build_sharing(config)
    tp, width = generator.inference_engine_tensor_parallel_size, NUM_BYTES[generator.model_dtype]
    weights = num_parameters(model) * width // tp
    longest = generator.longest_conversation
    sequence = -(-longest // BLOCK) * BLOCK * cache_bytes_per_token(model, tp, width)
    steps = _step_bytes(config, model, width)
    margin = sharing.engine_margin(longest if config.trainer.verify_sync_every else 0)
    if generator.gpu_memory_utilization is not None:
        taken = generator.gpu_memory_utilization * capacity
    else:
        use = DeviceUse("0", int(capacity - left), int(capacity))
        try:
            taken = memory_fraction([use], margin, ModelSize(weights, model.vocab_size)) * capacity
        except MemoryError:
            taken = 0.0
    cache = taken - weights - steps
    if generator.kv_cache_memory_gb is not None:
        cache = generator.kv_cache_memory_gb * GIB
    elif sharing.cached_sequences is not None:
        wanted = (sharing.cached_sequences + 1) * sequence
        cache = wanted if wanted <= (taken - weights) * MAX_CACHE_FRACTION else cache
    cache = max(cache, sequence)
    least = cache if generator.kv_cache_memory_gb is not None else sequence
    outside = readings.engine_context_gib * GIB, 2 * generator.weight_sync_bucket_mb * 2**20
    unused = 0.0
    if generator.gpu_memory_utilization is not None:  # vLLM refuses to start if a sequence does not fit into its share
        unused = max(0.0, capacity - left - taken - sum(outside))
    parts = (
        Part("weights", weights, EXACT),
        Part("KV cache", cache, 0.0, least=least),
        Part("engine steps", steps, GUESSED),
        Part("CUDA context, graphs and NCCL", outside[0], GUESSED),
        Part("arriving weights", outside[1], ESTIMATED),
        *((Part("beyond gpu_memory_utilization", unused, EXACT),) if unused else ()),
    )
    return EngineMemory(parts, cache / sequence)


def cache_bytes_per_token(model: PretrainedConfig, tp: int, width: int) -> int:
    """Bytes of a token's keys and values, or of its latent vector, in the cache of one worker."""
    if is_latent(model):
        each = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        heads = model.num_key_value_heads
        each = sum(head_sizes(model)) * heads // min(tp, heads)
    return int(model.num_hidden_layers * each * width)


def _step_bytes(config: Config, model: PretrainedConfig, width: int) -> float:
    """Bytes that vLLM's profiling run finds: the widest layer of a full prefill, and the logits of all sequences."""
    generator = config.generator
    tp = generator.inference_engine_tensor_parallel_size
    tokens = max(generator.step_tokens, generator.longest_conversation)
    inner = model.intermediate_size
    if num_experts(model):
        inner = expert_width(model) * model.num_experts_per_tok
    prefill = tokens * width * (4 * model.hidden_size + 3 * inner / tp)
    return float(prefill + min(generator.step_sequences, tokens) * model.vocab_size * BYTES_PER_SAMPLED_LOGIT)
