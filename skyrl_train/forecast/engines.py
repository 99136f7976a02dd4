"""Memory of a vLLM engine's worker by the rules of engines/vllm/memory.py, and its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from skyrl_train.cluster.pool.settings import teacher_generator
from skyrl_train.cluster.sharing import build_sharing
from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.device.nvml import DeviceUse
from skyrl_train.engines.settings import NUM_BYTES, Margin
from skyrl_train.engines.vllm.memory import (
    BLOCK,
    BYTES_PER_LOGIT,
    MAX_CACHE_FRACTION,
    MAX_SCORE_FRACTION,
    ModelSize,
    cache_width,
    fp8_bytes,
    memory_fraction,
)
from skyrl_train.forecast.parts import ESTIMATED, EXACT, GIB, GUESSED, Part
from skyrl_train.forecast.readings import Readings
from skyrl_train.hf.matrices import expert_width, head_sizes, is_latent, layers, num_experts, num_parameters

BYTES_PER_SAMPLED_LOGIT = 10
"""A logit of an engine step in half precision, and two float32 copies."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one worker of an engine."""

    parts: tuple[Part, ...]
    sequences: float
    """Number of sequences of maximum length that the KV cache holds."""


def engine_memory(
    config: Config, model: PretrainedConfig, capacity: float, left: float, readings: Readings
) -> EngineMemory:
    """An engine that generates. Args: capacity: bytes of the device; left: bytes that trainers keep on it while the
    engine starts.
    """
    generator, sharing = config.generator, build_sharing(config)
    longest = _longest(generator)
    margin = sharing.engine_margin(longest if config.trainer.verify_sync_every else 0)
    arriving = Part("arriving weights", 2 * generator.weight_sync_bucket_mb * 2**20, ESTIMATED)
    worker = _Worker(generator, model, longest, margin, arriving, sharing.cached_sequences)
    return _memory(worker, capacity, left, readings)


def teacher_memory(config: Config, model: PretrainedConfig, capacity: float, readings: Readings) -> EngineMemory:
    """An engine that scores with a teacher, on its own devices; hints in its prompts are not counted."""
    longest = config.generator.max_input_length + config.generator.sampling_params.max_generate_length + 1
    scores = scored_sample(longest, model, capacity)
    worker = _Worker(teacher_generator(config), model, longest, Margin(scored_tokens=longest), scores)
    return _memory(worker, capacity, 0.0, readings)


def scored_sample(tokens: int, model: PretrainedConfig, capacity: float) -> Part:
    """What an engine needs to compute the logprobs of a sample. Args: capacity: bytes of the device."""
    num_bytes = min(tokens * model.vocab_size * BYTES_PER_LOGIT, capacity * MAX_SCORE_FRACTION)
    return Part("logits of a scored sample", num_bytes, GUESSED)


def cache_bytes(config: Config, model: PretrainedConfig) -> int:
    """Bytes of a worker's KV cache for the samples of a step on shared devices, of an engine without clients."""
    sequences = build_sharing(config).cached_sequences
    assert sequences is not None
    return (sequences + 1) * _sequence_bytes(_longest(config.generator), model, config.generator)


def _longest(generator: GeneratorConfig) -> int:
    """Tokens of the longest sequence that an engine takes."""
    return int(generator.engine_init_kwargs.get("max_model_len", generator.longest_conversation))


def _sequence_bytes(longest: int, model: PretrainedConfig, generator: GeneratorConfig) -> int:
    tp = generator.inference_engine_tensor_parallel_size
    return -(-longest // BLOCK) * BLOCK * cache_bytes_per_token(model, tp, cache_width(generator))


@dataclass(frozen=True, slots=True)
class _Worker:
    """What the memory of a worker depends on."""

    generator: GeneratorConfig
    model: PretrainedConfig
    longest: int
    """Tokens of the longest sequence."""
    margin: Margin
    beside: Part
    """Memory beyond vLLM's fraction, apart from the CUDA context."""
    cached_sequences: int | None = None
    """Number of sequences for which a KV cache is worth its memory; None for all that fit."""

    @property
    def tp(self) -> int:
        return self.generator.inference_engine_tensor_parallel_size

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return NUM_BYTES[self.generator.model_dtype]


def _memory(worker: _Worker, capacity: float, left: float, readings: Readings) -> EngineMemory:
    generator, model, tp, width = worker.generator, worker.model, worker.tp, worker.width
    weights = weight_bytes(model, width, generator.quantization) // tp
    sequence = _sequence_bytes(worker.longest, model, generator)
    steps = _step_bytes(worker)
    fraction, cache_gb = generator.gpu_memory_utilization, generator.kv_cache_memory_gb
    if fraction is not None:
        taken = fraction * capacity
    else:
        use = DeviceUse("0", int(capacity - left), int(capacity))
        try:
            taken = memory_fraction([use], worker.margin, ModelSize(weights, model.vocab_size)) * capacity
        except MemoryError:
            taken = 0.0
    cache = taken - weights - steps
    if cache_gb is not None:
        cache = cache_gb * GIB
    elif fraction is None and worker.cached_sequences is not None:
        wanted = (worker.cached_sequences + 1) * sequence
        cache = wanted if wanted <= (taken - weights) * MAX_CACHE_FRACTION else cache
    cache = max(cache, sequence)
    least: float | None = sequence if cache_gb is None else cache
    context = Part("CUDA context, graphs and NCCL", readings.engine_context_gib * GIB, GUESSED)
    error_of_weights, error_of_steps, unused = EXACT, GUESSED, 0.0
    if fraction is not None and cache_gb is None and weights * (1 + EXACT) + steps * (1 + GUESSED) + sequence <= taken:
        error_of_weights, error_of_steps, least = 0.0, 0.0, None  # vLLM takes exactly its share
    elif fraction is not None:  # vLLM refuses to start if a sequence does not fit into its share
        unused = max(0.0, capacity - left - taken - context.likely - worker.beside.likely)
    parts = (
        Part("weights", weights, error_of_weights),
        Part("KV cache", cache, 0.0, least=least),
        Part("engine steps", steps, error_of_steps),
        context,
        worker.beside,
        *((Part("beyond gpu_memory_utilization", unused, EXACT),) if unused else ()),
    )
    return EngineMemory(parts, cache / sequence)


def weight_bytes(model: PretrainedConfig, width: int, quantization: str | None) -> int:
    """Bytes of an engine's weights, all its workers together. Args: width: bytes per element of those that are not
    quantised: embedding, output layer, routers, norms and biases.
    """
    total = num_parameters(model) * width
    if quantization is None:
        return total
    matrices = [matrix for layer in layers(model) for matrix in layer.linear]
    return total - sum(
        (matrix.size * width - fp8_bytes(matrix.outputs, matrix.inputs)) * matrix.count for matrix in matrices
    )


def cache_bytes_per_token(model: PretrainedConfig, tp: int, width: int) -> int:
    """Bytes of a token's keys and values, or of its latent vector, in the cache of one worker."""
    if is_latent(model):
        each = model.kv_lora_rank + model.qk_rope_head_dim
    else:
        heads = model.num_key_value_heads
        each = sum(head_sizes(model)) * heads // min(tp, heads)
    return int(model.num_hidden_layers * each * width)


def _step_bytes(worker: _Worker) -> float:
    """Bytes that vLLM's profiling run finds: the widest layer of a full prefill, and the logits of all sequences."""
    generator, model = worker.generator, worker.model
    tokens = max(generator.step_tokens, worker.longest)
    inner = model.intermediate_size
    if num_experts(model):
        inner = expert_width(model) * model.num_experts_per_tok
    prefill = tokens * worker.width * (4 * model.hidden_size + 3 * inner / worker.tp)
    return float(prefill + min(generator.step_sequences, tokens) * model.vocab_size * BYTES_PER_SAMPLED_LOGIT)
