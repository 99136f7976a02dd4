"""Device memory of an engine where the configuration leaves it open: `generator.gpu_memory_utilization` and KV cache.

vLLM takes a fraction of the whole device for weights, KV cache and the memory of its profiling run, and refuses to
start where less is free. The fraction does not cover its CUDA context and NCCL, nor what it needs later: buffers of
arriving weights, and the logits of a scored sample. An engine leaves a margin for these and for trainers on the same
devices.

The KV cache would take the rest. Between two weight updates only the sequences of one step fill it, and on shared
devices every byte is unmapped and mapped again in each step: the cache is no larger than those sequences.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.device.nvml import DeviceUse, devices_in_use, gib
from skyrl_train.engines.settings import NUM_BYTES, ROUTER, EngineSettings, Margin
from skyrl_train.hf.checkpoint import tensor_shapes

MIN_MARGIN = 3 << 30
"""Bytes: a CUDA context and NCCL, and two buckets of arriving weights."""
BYTES_PER_LOGIT = 8
"""Logit in the model's dtype, float32 logprob, and rank. vLLM (0.26 to 0.32) scores a sample at once."""
MAX_SCORE_FRACTION = 0.25
"""Fraction of the free memory; vLLM's newer model runner scores in chunks, and needs less for long samples."""
CACHE_ARGUMENTS = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
MAX_CACHE_FRACTION = 0.5
"""Fraction of the memory beside the weights: vLLM does not check that its steps fit beside an explicit KV cache."""
BLOCK = 128
"""Tokens; a multiple of the block sizes of vLLM's attention backends."""
CACHED = re.compile(r"\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|kv_a_proj_with_mqa)\.weight$")
"""Matrices whose rows are what a layer caches of a token."""

UNQUANTISED = re.compile(rf"(embed_tokens|lm_head|{ROUTER})")
"""Modules that quantised engines keep in the model's dtype: embedding, output layer, routers."""


def fp8_bytes(rows: int, columns: int) -> int:
    """Bytes of a quantised matrix: one per element, and a float32 scale per row."""
    return rows * (columns + 4)


@dataclass(frozen=True, slots=True)
class ModelSize:
    weights_bytes: int
    """Per worker of the engine."""
    vocabulary: int

    @classmethod
    def of(cls, settings: EngineSettings) -> ModelSize:
        named = tensor_shapes(settings.model_path)
        generator, shapes = settings.generator, named.values()
        width, is_quantised = NUM_BYTES[generator.model_dtype], generator.quantization is not None
        num_bytes = sum(
            fp8_bytes(math.prod(shape[:-1]), shape[-1])
            if is_quantised and len(shape) > 1 and not UNQUANTISED.search(name.removesuffix(".weight"))
            else math.prod(shape) * width
            for name, shape in named.items()
        )
        # No matrix has more rows than the embedding, except in toy models, where it does not matter.
        return cls(num_bytes // settings.tensor_parallel_size, max(shape[0] for shape in shapes if len(shape) == 2))


def with_memory_sizes(settings: EngineSettings, device_type: str) -> EngineSettings:
    """Fill in and print the sizes that the user left open; without a GPU, return the settings unchanged.
    Raises: MemoryError if too little is free; OSError if the driver does not report the free memory.
    """
    generator = settings.generator
    is_set = generator.gpu_memory_utilization is not None or "gpu_memory_utilization" in generator.engine_init_kwargs
    if device_type == "cpu" or is_set:
        return settings
    try:
        devices = devices_in_use(settings.tensor_parallel_size)
    except OSError as error:
        raise OSError(f"{error}: set generator.gpu_memory_utilization") from error
    model = ModelSize.of(settings)
    fraction = memory_fraction(devices, settings.margin, model)
    taken = fraction * min(device.total_bytes for device in devices)
    print(f"gpu_memory_utilization: {fraction:g}, {gib(taken)} GiB. {'; '.join(map(str, devices))}", flush=True)
    return settings.changed(
        gpu_memory_utilization=fraction,
        kv_cache_memory_gb=_cache_gb(settings, int((taken - model.weights_bytes) * MAX_CACHE_FRACTION)),
    )


def memory_fraction(devices: Sequence[DeviceUse], margin: Margin, model: ModelSize) -> float:
    """Fraction of the whole device that leaves the margin on each of an engine's devices, in whole thousandths.
    Raises: MemoryError if the weights do not fit.
    """
    margins = []
    for device in devices:
        scores = min(
            margin.scored_tokens * model.vocabulary * BYTES_PER_LOGIT, int(device.free_bytes * MAX_SCORE_FRACTION)
        )
        margins.append(max(int(device.free_bytes * margin.share), MIN_MARGIN + scores) + margin.for_trainers)
    fractions = [(device.free_bytes - left) / device.total_bytes for device, left in zip(devices, margins, strict=True)]
    tightest = fractions.index(min(fractions))
    if fractions[tightest] * devices[tightest].total_bytes <= model.weights_bytes:
        raise MemoryError(
            f"the engine does not fit. {devices[tightest]}; {gib(margins[tightest])} GiB of that are reserved for "
            f"buffers and trainers, and weights of {gib(model.weights_bytes)} GiB and a KV cache must fit into the "
            "rest. Free the device, give each engine more devices (generator.inference_engine_tensor_parallel_size), "
            "or set generator.gpu_memory_utilization to the fraction of the whole device that it may take"
        )
    return math.floor(fractions[tightest] * 1000) / 1000


def _cache_gb(settings: EngineSettings, max_bytes: int) -> float | None:
    """GiB of the KV cache where less than the rest of the memory is enough; None leaves it to vLLM."""
    generator = settings.generator
    is_set = any(name in generator.engine_init_kwargs for name in CACHE_ARGUMENTS)
    if generator.kv_cache_memory_gb is not None or settings.cached_sequences is None or is_set:
        return generator.kv_cache_memory_gb
    num_bytes = max_cache_bytes(settings, settings.cached_sequences)
    if num_bytes is None or num_bytes > max_bytes:
        return None
    print(f"kv_cache_memory_gb: {gib(num_bytes)}, for {settings.cached_sequences} of the longest sequences", flush=True)
    return num_bytes / 2**30


def max_cache_bytes(settings: EngineSettings, num_sequences: int) -> int | None:
    """Bytes that this many sequences of `max_model_len` tokens fill on one worker. None if the checkpoint does not say:
    a layer caches no keys and values, or has other names for their matrices.
    """
    config = json.loads(Path(settings.model_path, "config.json").read_text())
    heads, num_layers = config.get("num_key_value_heads") or 1, config.get("num_hidden_layers", 0)
    per_token, layers = 0, set()
    for name, shape in tensor_shapes(settings.model_path).items():
        match = CACHED.search(name)
        if match and int(match[1]) < num_layers:  # vLLM does not load the multi-token prediction layers that follow
            layers.add(match[1])
            # Each worker has at least one head of keys and values, and a full latent vector.
            is_latent = match[2] == "kv_a_proj_with_mqa"
            per_token += shape[0] if is_latent else shape[0] // min(settings.tensor_parallel_size, heads)
    if not num_layers or len(layers) != num_layers:
        return None
    longest = settings.generator.engine_init_kwargs.get("max_model_len", settings.max_model_len)
    tokens = -(-longest // BLOCK) * BLOCK
    return (num_sequences + 1) * tokens * per_token * cache_width(settings.generator)


def cache_width(generator: GeneratorConfig) -> int:
    """Bytes of an element of the KV cache."""
    name = str(generator.engine_init_kwargs.get("kv_cache_dtype", "auto"))
    return 1 if name.startswith("fp8") else NUM_BYTES.get(name, NUM_BYTES[generator.model_dtype])
