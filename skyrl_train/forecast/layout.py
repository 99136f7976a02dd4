"""Parameters that a rank of each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from transformers import PretrainedConfig

from skyrl_train.config.policy import OWN_STAGES, Layout, LoraConfig
from skyrl_train.forecast.adapters import AdaptedLayer, adapted_layers
from skyrl_train.hf.matrices import Layer, Matrix, is_tied, layers
from skyrl_train.megatron.model.stages import layers_of_stages


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one rank."""

    dense: int = 0
    """Outside the experts of mixtures."""
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True)
class Stage:
    """What a rank of a pipeline stage holds."""

    rank: int
    chunks: tuple[tuple[Layer, ...], ...]
    parameters: Parameters
    trained: Parameters
    has_head: bool
    cost: float
    """Weights that a token is multiplied with, on all tensor ranks."""

    @property
    def layers(self) -> list[Layer]:
        return [layer for chunk in self.chunks for layer in chunk]


def without_recomputation(layout: Layout) -> Layout:
    """The layout of passes without gradients."""
    return replace(layout, megatron=replace(layout.megatron, recompute_granularity=None))


def stages(
    config: PretrainedConfig, layout: Layout, lora: LoraConfig | None = None, *, is_critic: bool = False
) -> list[Stage]:
    """The stages of a model. Args: lora: adapters, if only they are trained; is_critic: without a language head."""
    model, head = layers(config), config.hidden_size * config.vocab_size
    costs = [float(layer.used_weights) for layer in model]
    if any(name in layout.megatron.transformer_config_kwargs for name in OWN_STAGES):
        counts = [len(model) // (layout.pp * layout.vpp)] * (layout.pp * layout.vpp)  # nearly, if they are not even
    else:
        counts = layers_of_stages(costs, float(head), layout.pp, layout.vpp)
    has_adapters = lora is not None and lora.rank > 0
    if lora is not None and has_adapters:
        # Later stages receive an input with a gradient, and recomputation gives one to the embedding (attach.py).
        max_unreached = counts[0] if layout.megatron.recompute is None else 0
        model = [*adapted_layers(model, lora, max_unreached)]
    ends = list(accumulate(counts))
    embedding = Parameters(-(-head // layout.tp))
    found = []
    for rank in range(layout.pp):
        numbers = range(rank, len(counts), layout.pp)
        chunks = tuple(tuple(model[ends[number] - counts[number] : ends[number]]) for number in numbers)
        is_first, is_last = rank == 0, rank == layout.pp - 1
        held = _total(_held(layer, layout) for chunk in chunks for layer in chunk)
        if is_first:
            held += embedding
        if is_last:
            held += Parameters(config.hidden_size)
        if is_last and not is_critic and not (is_first and is_tied(config)):
            held += embedding
        adapters = _total(_adapters(layer, layout) for chunk in chunks for layer in chunk)
        trained = adapters if has_adapters else held
        cost = sum(layer.used_weights for chunk in chunks for layer in chunk) + (head if is_last else 0)
        found.append(Stage(rank, chunks, held + adapters, trained, is_last and not is_critic, float(cost)))
    return found


def _total(parts: Iterable[Parameters]) -> Parameters:
    return sum(parts, Parameters())


def _held(layer: Layer, layout: Layout) -> Parameters:
    return _total(_share(matrix, matrix.size, layout) for matrix in layer.matrices) + Parameters(layer.vectors)


def _adapters(layer: Layer, layout: Layout) -> Parameters:
    found = Parameters()
    for site in layer.sites if isinstance(layer, AdaptedLayer) else ():
        count = site.parameters(layout)
        found += Parameters(experts=count) if site.is_expert else Parameters(count)
    return found


def _share(matrix: Matrix, elements: int, layout: Layout) -> Parameters:
    """A rank's part of as many elements of each matrix."""
    if matrix.sharding == "experts":
        return Parameters(experts=elements * matrix.count // (layout.ep * layout.etp))
    return Parameters(elements // (layout.tp if matrix.sharding == "tensor" else 1))
