"""What an engine takes of its devices: `generator.gpu_memory_utilization` where the user leaves it open.

vLLM takes a share of the whole device, and refuses to start where less is free. It counts its weights, its KV cache and
what its trial run needed into that share; not its CUDA context and NCCL, nor what it needs later: buffers in which
weights arrive, and the logits of a sample that is scored. So an engine leaves a margin for these, and one for trainers
that come back to the same devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.device.nvml import DeviceUse, devices_in_use, gib
from skyrl_train.engines.settings import NUM_BYTES, EngineSettings, Margin
from skyrl_train.engines.vllm.cache_size import most_cache_bytes
from skyrl_train.hf.checkpoint import tensor_shapes

LEAST = 3 << 30
"""Bytes: a CUDA context and NCCL, and two buckets of arriving weights."""
BYTES_PER_LOGIT = 8
"""Logit in the model's dtype, float32 logprob, and what ranks it. vLLM (0.26 to 0.32) scores a sample at once."""
MOST_FOR_SCORES = 0.25
"""Of what is free; vLLM's newer model runner scores in chunks, and needs less for long samples."""
SIZES_OF_CACHES = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""vLLM's own arguments."""
CERTAIN_ROOM = 0.5
"""Part of an engine's share beside the weights that a KV cache of a given size may be: vLLM does not look then whether
what its steps need fits beside it."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the checkpoint says of the model."""

    weights_bytes: int
    """Of one worker of the engine."""
    vocabulary: int

    @classmethod
    def of(cls, settings: EngineSettings) -> ModelSize:
        shapes = tensor_shapes(settings.model_path).values()
        num_bytes = sum(math.prod(shape) for shape in shapes) * NUM_BYTES[settings.generator.model_dtype]
        # No matrix has more rows than the embedding, but for toys, of which it does not matter.
        return cls(num_bytes // settings.tensor_parallel_size, max(shape[0] for shape in shapes if len(shape) == 2))


def bytes_left(free_bytes: int, margin: Margin, vocabulary: int) -> int:
    """The margin on a device of which so much is free."""
    scores = min(margin.scored_tokens * vocabulary * BYTES_PER_LOGIT, int(free_bytes * MOST_FOR_SCORES))
    return max(int(free_bytes * margin.share), LEAST + scores) + margin.for_trainers


def memory_share(devices: Sequence[DeviceUse], margin: Margin, model: ModelSize) -> float:
    """Share of the whole device that leaves the margin on each of an engine's devices, in whole thousandths.

    Raises: MemoryError if the weights do not fit.
    """
    left = [bytes_left(device.free_bytes, margin, model.vocabulary) for device in devices]
    shares = [(device.free_bytes - part) / device.total_bytes for device, part in zip(devices, left, strict=True)]
    tightest = shares.index(min(shares))
    if shares[tightest] * devices[tightest].total_bytes <= model.weights_bytes:
        raise MemoryError(
            f"an engine has no room. {devices[tightest]}; {gib(left[tightest])} GiB of that are left for buffers and "
            f"for trainers, and weights of {gib(model.weights_bytes)} GiB and a KV cache must fit into the rest. End "
            "what holds the device, give each engine more devices (generator.inference_engine_tensor_parallel_size), "
            "or set generator.gpu_memory_utilization to the share of the whole device that it may take"
        )
    return math.floor(shares[tightest] * 1000) / 1000


def with_memory_share(settings: EngineSettings, device_type: str) -> EngineSettings:
    """The settings with numbers where the user left them open, which are printed; without a GPU as they are.

    Raises: MemoryError if too little is free; OSError if the driver does not say what is.
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
    share = memory_share(devices, settings.margin, model)
    taken = share * min(device.total_bytes for device in devices)
    print(f"gpu_memory_utilization: {share:g}, {gib(taken)} GiB. {'; '.join(map(str, devices))}", flush=True)
    return settings.changed(
        gpu_memory_utilization=share,
        kv_cache_memory_gb=_cache_gb(settings, int((taken - model.weights_bytes) * CERTAIN_ROOM)),
    )


def _cache_gb(settings: EngineSettings, most: int) -> float | None:
    """GiB of the KV cache where less than all that is left would do; None leaves it to vLLM."""
    generator = settings.generator
    is_set = any(name in generator.engine_init_kwargs for name in SIZES_OF_CACHES)
    if generator.kv_cache_memory_gb is not None or settings.cached_sequences is None or is_set:
        return generator.kv_cache_memory_gb
    wanted = most_cache_bytes(settings, settings.cached_sequences)
    if wanted is None or wanted > most:
        return None
    print(f"kv_cache_memory_gb: {gib(wanted)}, for {settings.cached_sequences} of the longest sequences", flush=True)
    return wanted / 2**30
