"""Memory of the ranks of a model: what they hold, and the most that a pass over micro-batches adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from skyrl_train.config.policy import Layout
from skyrl_train.forecast.activations import Kept, kept, weight_gradient_bytes
from skyrl_train.forecast.layout import Parameters, Stage, without_recomputation
from skyrl_train.forecast.parts import COUNTED, ESTIMATED, EXACT, GIB, GUESSED, Part
from skyrl_train.forecast.readings import Readings
from skyrl_train.hf.matrices import Layer, is_latent
from skyrl_train.megatron.passes.pieces import FREE_SHARE, PIECE_BYTES

GRADIENT_BYTES = 4
STATE_BYTES = {2: 12, 4: 8}
"""Bytes of an element of the weights -> of its optimizer state: Adam's moments and, for half precision, a copy."""
MOMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """The largest pass over micro-batches."""

    tokens: int
    """Tokens of a micro-batch, of all context-parallel ranks."""
    micro_batches: int
    """Number of them on a rank in a mini-batch."""


@dataclass(frozen=True, slots=True)
class ModelOfRanks:
    """A model on the ranks of a layout."""

    config: PretrainedConfig
    layout: Layout
    width: int
    """Bytes of an element of weights and activations: 2 or 4."""
    stages: Sequence[Stage]

    @property
    def error(self) -> float:
        """Relative error of its activations."""
        return ESTIMATED if is_latent(self.config) or self.layout.ep > 1 else COUNTED


def weights(model: ModelOfRanks, stage: Stage) -> Part:
    return Part("weights", stage.parameters.total * model.width, EXACT)


def training_state(model: ModelOfRanks, stage: Stage) -> tuple[Part, Part]:
    """Gradients and optimizer state of the parameters that are trained."""
    trained = stage.trained
    return (
        Part("gradients", trained.total * GRADIENT_BYTES, EXACT),
        Part("optimizer", optimizer_bytes(trained, model.layout, model.width), EXACT),
    )


def optimizer_bytes(trained: Parameters, layout: Layout, width: int) -> float:
    """Bytes of the optimizer state of a rank on its device."""
    return _optimized(trained, layout) * STATE_BYTES[width] - host_moment_bytes(trained, layout)


def host_moment_bytes(trained: Parameters, layout: Layout) -> float:
    """Bytes of Adam's moments that a rank keeps on the host also while it trains."""
    return _optimized(trained, layout) * MOMENT_BYTES if layout.megatron.optimizer_cpu_offload else 0.0


def _optimized(trained: Parameters, layout: Layout) -> float:
    """Parameters of which a rank has the optimizer state, which data-parallel ranks share."""
    expert_ranks = layout.num_ranks // (layout.pp * layout.ep * layout.etp)
    return trained.dense / (layout.dp * layout.cp) + trained.experts / expert_ranks


def update(model: ModelOfRanks, stage: Stage, largest: Pass) -> tuple[Part, ...]:
    """All that torch allocates on a rank of the stage at the peak of an update."""
    config, layout = model.config, model.layout
    tokens = largest.tokens / layout.cp
    per_layer = [_of_chunk(model, chunk) for chunk in stage.chunks]
    of_chunks = [sum(each.layer * tokens + each.fixed for each in chunk) for chunk in per_layer]
    counts = in_flight(stage.rank, layout, largest)
    activations = sum(count * size for count, size in zip(counts, of_chunks, strict=True))
    working = max(_working(chunk, tokens) for chunk in per_layer)
    working += max(weight_gradient_bytes(layer, layout, model.width) for layer in stage.layers)
    if stage.has_head:
        activations += 2 * config.hidden_size * model.width / layout.sp * tokens  # the last norm
    return (
        weights(model, stage),
        *training_state(model, stage),
        Part("activations", activations, model.error),
        _peak_after_forward(model, stage, tokens, working),
    )


def _of_chunk(model: ModelOfRanks, chunk: Sequence[Layer]) -> list[Kept]:
    """What each layer of a chunk keeps; the first ones may be recomputed."""
    num, layout = model.layout.megatron.num_recomputed(len(chunk)), model.layout
    rest = without_recomputation(layout) if num else layout
    return [
        kept(model.config, layer, layout if index < num else rest, model.width) for index, layer in enumerate(chunk)
    ]


def _working(chunk: Sequence[Kept], tokens: float) -> float:
    """Bytes at the peak of a chunk's backward pass beside what its layers keep, which are freed from the last on."""
    peak = freed = 0.0
    for each in reversed(chunk):
        peak = max(peak, each.working * tokens - freed)
        freed += each.layer * tokens + each.fixed
    return peak


def _peak_after_forward(model: ModelOfRanks, stage: Stage, tokens: float, working: float) -> Part:
    """Logits, which are freed before the last layer's backward pass, or what that needs (`working` bytes)."""
    logits, piece = (logit_bytes(model, tokens), _piece_bytes(model, tokens)) if stage.has_head else (0.0, 0.0)
    recompute = model.layout.megatron.recompute_logits
    most, least = (piece if recompute else logits), (logits if recompute is False else piece)
    if working >= most:
        return Part("a layer's backward pass", working, model.error)
    return Part("logits", most, COUNTED, least=None if most == least else max(least, working))


def scoring(model: ModelOfRanks, stage: Stage, largest: Pass) -> tuple[Part, ...]:
    """All that torch allocates on a rank of the stage in a forward pass without gradients."""
    tokens, layout = largest.tokens / model.layout.cp, without_recomputation(model.layout)
    working = max(kept(model.config, layer, layout, model.width).layer for layer in stage.layers) * tokens
    logits = _piece_bytes(model, tokens) if stage.has_head else 0.0
    peak = Part("logits", logits, COUNTED) if logits > working else Part("activations", working, ESTIMATED)
    return weights(model, stage), peak


def logit_bytes(model: ModelOfRanks, tokens: float) -> float:
    return tokens * model.config.vocab_size / model.layout.tp * model.width


def _piece_bytes(model: ModelOfRanks, tokens: float) -> float:
    """Logits that the head computes at a time."""
    chunk = model.layout.megatron.logprobs_chunk_size
    return min(logit_bytes(model, tokens), PIECE_BYTES if chunk is None else logit_bytes(model, chunk))


def in_flight(rank: int, layout: Layout, largest: Pass) -> list[int]:
    """Micro-batches of each chunk of a pipeline rank whose activations are kept at the peak (1F1B, interleaved)."""
    if layout.vpp == 1:
        return [min(layout.pp - rank, largest.micro_batches)]
    total = min((layout.pp - rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1, layout.vpp * largest.micro_batches)
    # Chunks alternate after as many micro-batches as there are stages, beginning with the first chunk.
    counts = [0] * layout.vpp
    for number in range(total):
        counts[number // layout.pp % layout.vpp] += 1
    return counts


def outside_torch(layout: Layout, readings: Readings) -> Part:
    """CUDA context, kernels and the buffers of NCCL's communicators."""
    large = sum(size > 1 for size in (layout.tp, layout.cp, layout.dp * layout.cp, layout.ep))
    gib = readings.context_gib + large * readings.communicator_gib
    gib += readings.pipeline_communicator_gib if layout.pp > 1 else 0.0
    return Part("CUDA context and NCCL", gib * GIB, ESTIMATED)


def weight_syncs(bucket_mb: int, readings: Readings) -> Part:
    """Buffers and communicator that a rank keeps to send weights to engines on other devices."""
    return Part("weight syncs", 2 * bucket_mb * 2**20 + readings.sync_communicator_gib * GIB, ESTIMATED)


def room_for_logits(capacity: float) -> float:
    """Bytes of a rank up to which the head keeps logits for the backward pass."""
    return (1 - FREE_SHARE) * capacity - PIECE_BYTES


def allocator(parts: Sequence[Part], readings: Readings) -> Part:
    """Memory that torch reserves beyond its tensors."""
    return Part("torch's allocator", readings.allocator_fraction * sum(part.likely for part in parts), GUESSED)
