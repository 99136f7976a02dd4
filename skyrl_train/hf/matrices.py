"""The matrices of a Hugging Face model's layers, from its config.json alone. Imports no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

Sharding = Literal["tensor", "experts", "none"]
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")
BIASED_FAMILIES = ("qwen2",)
ATTENTION = "self_attn"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, or as many of the same size as a layer has experts."""

    module: str
    """Hugging Face's name of its module in the layer; {} is the number of an expert."""
    inputs: int
    outputs: int
    sharding: Sharding = "tensor"
    """Ranks that share it: of tensor parallelism, of expert parallelism, or none (each has all of it)."""
    count: int = 1
    used: int = 1
    """Number of them that a token is multiplied with."""

    @property
    def size(self) -> int:
        """Elements of one matrix."""
        return self.inputs * self.outputs

    @property
    def modules(self) -> list[str]:
        """Its module, or those of all experts."""
        return [self.module.format(number) for number in range(self.count)]


@dataclass(frozen=True, slots=True)
class Layer:
    """A transformer layer."""

    is_sparse: bool
    """Whether its MLP is a mixture of experts."""
    attention: tuple[Matrix, ...]
    mlp: tuple[Matrix, ...]
    """Also the router and the shared experts of a mixture."""
    vectors: int
    """Elements of norms and biases, which every rank has."""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.attention + self.mlp

    @property
    def linear(self) -> tuple[Matrix, ...]:
        """Matrices that can have adapters and can be quantised: all but the router."""
        return self.attention + (self.mlp[1:] if self.is_sparse else self.mlp)

    @property
    def parameters(self) -> int:
        return self.vectors + sum(matrix.size * matrix.count for matrix in self.matrices)

    @property
    def used_weights(self) -> int:
        """Weights of the matrices that a token is multiplied with."""
        return sum(matrix.size * matrix.used for matrix in self.matrices)


def layers(config: PretrainedConfig) -> list[Layer]:
    """The layers of a dense model or a mixture of experts, with grouped-query or multi-latent attention."""
    attention, vectors = _attention(config), _vectors(config)
    dense = Layer(False, attention, _dense("mlp", config.hidden_size, config.intermediate_size), vectors)
    if not num_experts(config):
        return [dense] * config.num_hidden_layers
    sparse = Layer(True, attention, _sparse(config), vectors)
    return [sparse if kind == "sparse" else dense for kind in _kinds(config)]


def num_parameters(config: PretrainedConfig) -> int:
    """Parameters of the whole model; a tied output layer counts once."""
    embeddings = config.hidden_size * config.vocab_size * (1 if is_tied(config) else 2)
    return sum(layer.parameters for layer in layers(config)) + embeddings + config.hidden_size


def num_tensors(config: PretrainedConfig) -> int:
    """Matrices of all layers, as checkpoints have them; embeddings and vectors do not count."""
    return sum(matrix.count for layer in layers(config) for matrix in layer.matrices)


def is_tied(config: PretrainedConfig) -> bool:
    """Whether the output layer is the embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def is_latent(config: PretrainedConfig) -> bool:
    """Whether attention is multi-latent."""
    return bool(getattr(config, "kv_lora_rank", None))


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Size of a head's query (and key), and of its value."""
    if is_latent(config):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size, size


def has_qk_norm(config: PretrainedConfig) -> bool:
    """Whether the heads of queries and keys are normed."""
    return config.model_type in QK_NORM_FAMILIES or bool(getattr(config, "use_qk_norm", False))


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer; 0 for a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)


def expert_width(config: PretrainedConfig) -> int:
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def shared_width(config: PretrainedConfig) -> int:
    """Width of the shared experts together; 0 if there are none."""
    shared = (getattr(config, "n_shared_experts", 0) or 0) * expert_width(config)
    return int(shared + (getattr(config, "shared_expert_intermediate_size", 0) or 0))


def _attention(config: PretrainedConfig) -> tuple[Matrix, ...]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query_size, value_size = head_sizes(config)
    output = Matrix(f"{ATTENTION}.o_proj", heads * value_size, hidden)
    query: tuple[Matrix, ...] = (Matrix(f"{ATTENTION}.q_proj", hidden, heads * query_size),)
    if not is_latent(config):
        keys = config.num_key_value_heads * query_size
        return *query, Matrix(f"{ATTENTION}.k_proj", hidden, keys), Matrix(f"{ATTENTION}.v_proj", hidden, keys), output
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    if q_rank:
        down = Matrix(f"{ATTENTION}.q_a_proj", hidden, q_rank, "none")
        query = down, Matrix(f"{ATTENTION}.q_b_proj", q_rank, heads * query_size)
    down = Matrix(f"{ATTENTION}.kv_a_proj_with_mqa", hidden, kv_rank + config.qk_rope_head_dim, "none")
    up = Matrix(f"{ATTENTION}.kv_b_proj", kv_rank, heads * (config.qk_nope_head_dim + value_size))
    return (*query, down, up, output)


def _dense(module: str, hidden: int, width: int) -> tuple[Matrix, ...]:
    """Gate, up and down projection."""
    return (
        Matrix(f"{module}.gate_proj", hidden, width),
        Matrix(f"{module}.up_proj", hidden, width),
        Matrix(f"{module}.down_proj", width, hidden),
    )


def _sparse(config: PretrainedConfig) -> tuple[Matrix, ...]:
    hidden, width, count = config.hidden_size, expert_width(config), num_experts(config)
    mlp, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if config.model_type == "mixtral":
        mlp, names = "block_sparse_moe", ("w1", "w3", "w2")
    sizes = (hidden, width), (hidden, width), (width, hidden)
    used = config.num_experts_per_tok
    experts = tuple(
        Matrix(f"{mlp}.experts.{{}}.{name}", inputs, outputs, "experts", count, used)
        for name, (inputs, outputs) in zip(names, sizes, strict=True)
    )
    of_shared = "mlp.shared_expert" if hasattr(config, "shared_expert_intermediate_size") else "mlp.shared_experts"
    shared = _dense(of_shared, hidden, width) if (width := shared_width(config)) else ()
    return (Matrix(f"{mlp}.gate", hidden, count, "none"), *experts, *shared)


def _kinds(config: PretrainedConfig) -> list[str]:
    """Kind of each layer's MLP in a mixture of experts: "dense" or "sparse"."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return list(kinds)
    first = getattr(config, "first_k_dense_replace", 0) or 0
    return ["dense"] * first + ["sparse"] * (config.num_hidden_layers - first)


def _vectors(config: PretrainedConfig) -> int:
    size, heads = head_sizes(config)[0], config.num_attention_heads
    count = 2 * config.hidden_size
    if is_latent(config):
        return count + (config.q_lora_rank or 0) + config.kv_lora_rank
    if has_qk_norm(config):
        count += 2 * size
    biased = config.model_type in BIASED_FAMILIES or getattr(config, "qkv_bias", False)
    if biased or getattr(config, "attention_bias", False):
        count += (heads + 2 * config.num_key_value_heads) * size
    return int(count)
