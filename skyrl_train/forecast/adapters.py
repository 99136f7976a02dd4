"""Adapters of the chosen modules on a rank: their parameters, and what changes in the tensors that layers keep.

Counted from megatron/lora/adapters.py. Modules that Megatron computes in one layer have an A each and share the rows of
one B, which has rows for those without an adapter too. A frozen linear layer keeps no input, except that of experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from skyrl_train.config.policy import Layout, LoraConfig
from skyrl_train.hf import matrices
from skyrl_train.hf.adapter import targets
from skyrl_train.hf.matrices import Layer, Matrix

JOINT = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")
"""Modules that are one linear layer of Megatron."""
OF_FIRST_NORM = ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")
"""First modules of the layers that share the input of attention."""
ROW_PARALLEL = ("o_proj", "down_proj", "w2")
MASK = 1
"""Bytes of an element of dropout's mask."""


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer of Megatron with an adapter."""

    first: Matrix
    """The first of its matrices."""
    outputs: int
    """Rows of all its matrices."""
    num_adapted: int
    """Number of its modules that have an adapter."""
    rank: int

    @property
    def leaf(self) -> str:
        return self.first.module.rpartition(".")[2]

    @property
    def is_row(self) -> bool:
        return self.leaf in ROW_PARALLEL

    @property
    def is_expert(self) -> bool:
        return self.first.sharding == "experts"

    @property
    def in_attention(self) -> bool:
        return self.first.module.startswith(matrices.ATTENTION)

    def parameters(self, layout: Layout) -> int:
        """Elements of A and B on a rank. Tensor parallelism shards A's inputs (row parallel) or B's rows (column
        parallel) and replicates the other.
        """
        return self._num_local(layout) * self.rank * (self.num_adapted * self._columns(layout) + self._rows(layout))

    def weights(self, layout: Layout) -> int:
        """Weights of a rank that the adapters change."""
        return self._num_local(layout) * self._columns(layout) * self._rows(layout)

    def padded(self, layout: Layout) -> int:
        """Elements of B with zeros for the A of other modules, with which the adapter multiplies."""
        return self._num_local(layout) * self._rows(layout) * self.num_adapted * self.rank

    def hidden(self, layout: Layout) -> float:
        """Elements for each token of a micro-batch between A and B."""
        is_gathered = self.first.sharding == "tensor" and not self.is_row
        tokens = self._expert_rows(layout) if self.is_expert else 1 if is_gathered else 1 / layout.sp
        return tokens * self.num_adapted * self.rank

    def input(self, layout: Layout) -> float:
        """Elements of the layer's input for each token of a micro-batch."""
        if self.is_row:
            return self._expert_rows(layout) * self.first.inputs / self._shards(layout)
        return (self._expert_rows(layout) if self.is_expert else 1 / layout.sp) * self.first.inputs

    def _columns(self, layout: Layout) -> int:
        return self.first.inputs // (self._shards(layout) if self.is_row else 1)

    def _rows(self, layout: Layout) -> int:
        return self.outputs // (1 if self.is_row else self._shards(layout))

    def _num_local(self, layout: Layout) -> int:
        return self.first.count // layout.ep if self.is_expert else 1

    def _shards(self, layout: Layout) -> int:
        return {"experts": layout.etp, "tensor": layout.tp, "none": 1}[self.first.sharding]

    def _expert_rows(self, layout: Layout) -> float:
        """Copies of a token for the experts of a rank; 1 elsewhere."""
        return self.first.used * layout.etp / layout.sp if self.is_expert else 1


@dataclass(frozen=True, slots=True)
class AdaptedLayer(Layer):
    """A layer of a model with frozen weights: its adapters are trained, if it has any."""

    sites: tuple[Site, ...] = ()
    drops: bool = False
    """Whether the adapters have dropout."""
    is_reached: bool = True
    """Whether a gradient reaches the layer. Layers before the model's first adapter keep no activations."""


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that a half of a layer, attention or MLP, keeps more (or less) than if all weights are trained."""

    per_token: float = 0.0
    fixed: float = 0.0
    """Bytes independent of the number of tokens."""


def change(config: PretrainedConfig, layer: Layer, layout: Layout, width: int, *, in_attention: bool) -> Change:
    """Args: width: bytes of an element of activations."""
    if not isinstance(layer, AdaptedLayer):
        return Change()
    sites = [site for site in layer.sites if site.in_attention == in_attention]
    inputs = {_source(site): site.input(layout) for site in sites if not _is_kept_anyway(site, layer)}
    per_token = sum(site.hidden(layout) for site in sites) * width
    if layer.drops:  # a copy for each adapter, in place of the inputs
        per_token += sum(site.input(layout) for site in sites) * (width + MASK)
    else:
        per_token += sum(inputs.values()) * width
    frozen = _inputs_of_attention(config, layout) if in_attention else _inputs_of_mlp(config, layer, layout)
    return Change(per_token - frozen * width, sum(site.padded(layout) for site in sites) * width)


def _source(site: Site) -> str:
    return "norm" if site.leaf in OF_FIRST_NORM else site.first.module


def _is_kept_anyway(site: Site, layer: Layer) -> bool:
    """Whether another operation keeps the input anyway: attention (its output), the router, or the experts."""
    return site.is_expert or site.leaf == "o_proj" or (layer.is_sparse and not site.in_attention and not site.is_row)


def _inputs_of_attention(config: PretrainedConfig, layout: Layout) -> float:
    """Elements for each token that linear layers alone keep if their weights are trained."""
    latents = (config.q_lora_rank or 0) + config.kv_lora_rank if matrices.is_latent(config) else 0
    return config.hidden_size / layout.sp + latents


def _inputs_of_mlp(config: PretrainedConfig, layer: Layer, layout: Layout) -> float:
    if layer.is_sparse:
        return matrices.shared_width(config) / layout.tp
    return float(config.hidden_size / layout.sp + config.intermediate_size / layout.tp)


def adapted_layers(model: list[Layer], lora: LoraConfig, max_unreached: int = 0) -> list[AdaptedLayer]:
    """The layers with the adapters that `target_modules` and `exclude_modules` select.

    Args: max_unreached: number of leading layers that no gradient reaches if they have no adapters. Raises: ValueError
        for a target that matches no module, or if nothing is left.
    """
    found = _adapted_layers(tuple(model), lora)
    first = next(index for index, layer in enumerate(found) if layer.sites)
    num_unreached = min(first, max_unreached)
    return [*(replace(layer, is_reached=False) for layer in found[:num_unreached]), *found[num_unreached:]]


@functools.lru_cache(maxsize=4)
def _adapted_layers(model: tuple[Layer, ...], lora: LoraConfig) -> tuple[AdaptedLayer, ...]:
    chosen = _chosen(model, lora)
    made: dict[tuple[Layer, frozenset[str]], AdaptedLayer] = {}  # one object for equal layers
    found = []
    for index, layer in enumerate(model):
        names = frozenset(m.module for m in layer.linear if any(name in chosen for name in _names(index, m)))
        if (layer, names) not in made:
            own = layer.is_sparse, layer.attention, layer.mlp, layer.vectors
            made[layer, names] = AdaptedLayer(*own, sites=_sites(layer, names, lora.rank), drops=lora.dropout > 0)
        found.append(made[layer, names])
    return tuple(found)


def _sites(layer: Layer, names: frozenset[str], rank: int) -> tuple[Site, ...]:
    groups: dict[str, list[Matrix]] = {}
    for matrix in layer.linear:
        stem, _, leaf = matrix.module.rpartition(".")
        joint = next((each[0] for each in JOINT if leaf in each), leaf)
        groups.setdefault(f"{stem}.{joint}", []).append(matrix)
    found = []
    for group in groups.values():
        adapted = [matrix for matrix in group if matrix.module in names]
        if adapted:
            found.append(Site(group[0], sum(matrix.outputs for matrix in group), len(adapted), rank))
    return tuple(found)


def num_sent(model: list[Layer], lora: LoraConfig) -> int:
    """Elements of A and B of all chosen modules, as an adapter is sent or saved."""
    return sum(lora.rank * sum(shape) for shape in _chosen(tuple(model), lora).values())


def num_sent_tensors(model: list[Layer], lora: LoraConfig) -> int:
    """Number of A and B that are sent."""
    return 2 * len(_chosen(tuple(model), lora))


@functools.lru_cache(maxsize=4)
def _chosen(model: tuple[Layer, ...], lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Chosen modules with the shapes of their weights."""
    found = [(index, matrix) for index, layer in enumerate(model) for matrix in layer.linear]
    shapes = {name: (matrix.outputs, matrix.inputs) for index, matrix in found for name in _names(index, matrix)}
    return targets(shapes, lora)


def _names(index: int, matrix: Matrix) -> list[str]:
    return [f"model.layers.{index}.{module}" for module in matrix.modules]
