"""Torch layers for Megatron-core under Transformer Engine's parameter names.

`install()` replaces the provider of modules for Megatron's own "Transformer Engine" layer specs, so no spec is copied
and the names (and with them checkpoints and the mapping to Hugging Face) are the same with either implementation.
Provider signatures of megatron-core 0.16 and 0.19 differ; this file handles both.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import experts
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from skyrl_train.megatron.layers.attention import packed_attention
from skyrl_train.megatron.layers.experts import GroupedColumnLinear, GroupedRowLinear
from skyrl_train.megatron.layers.norm import rms_norm
from skyrl_train.megatron.layers.recompute import NORMS, SWIGLU, recomputes, unsaved, unsaved_activation


def _known(cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that `cls` accepts: newer megatron-core passes `name` to every linear layer."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return {key: value for key, value in kwargs.items() if key in parameters}


class Norm(torch.nn.Module):
    """RMSNorm over the last axis, computed in float32 as Hugging Face does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"normalization is {config.normalization!r}; the torch layers have RMSNorm only")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear layer with the keyword arguments of newer specs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_known(ColumnParallelLinear, kwargs))


class RowLinear(RowParallelLinear):
    """Megatron's row-parallel linear layer with the keyword arguments of newer specs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **_known(RowParallelLinear, kwargs))
        self._recomputes = recomputes(self.config, SWIGLU)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        with unsaved_activation(input_) if self._recomputes else contextlib.nullcontext():
            return super().forward(input_)  # type: ignore[no-any-return]


class NormColumnLinear(ColumnLinear):
    """RMSNorm, then a column-parallel linear layer; parameters `layer_norm_weight` and `weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._recomputes = recomputes(config, NORMS)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        normed = rms_norm(input_, self.layer_norm_weight, self.eps)
        if not self._recomputes:
            return super().forward(normed, *args, **kwargs)
        again = functools.partial(rms_norm, input_.detach(), self.layer_norm_weight.detach(), self.eps)
        with unsaved(normed, again):
            return super().forward(normed, *args, **kwargs)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer replicated on every tensor-parallel rank (the down projections of multi-latent attention)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class Attention(torch.nn.Module):
    """`packed_attention` with the interface that Megatron's attention layers call."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        head_size = k_channels or config.kv_channels
        assert head_size is not None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_size)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        out = packed_attention(query, key, value, packed_seq_params, self.scale)
        return out.reshape(out.shape[0], -1)


class TorchSpecProvider(BackendSpecProvider):
    """Provides the modules of this file and of experts.py to Megatron's layer specs."""

    def linear(self) -> type:
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return Attention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *_: Any) -> Any:
        return _grouped_experts()


def _grouped_experts() -> Any:
    if hasattr(experts, "GroupedMLPSubmodules"):  # 0.19
        submodules = experts.GroupedMLPSubmodules(
            linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear, activation_func=None
        )
        return functools.partial(experts.TEGroupedMLP, submodules=submodules)
    from megatron.core.transformer.mlp import MLPSubmodules

    return experts.TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear)


@functools.cache
def install_experts() -> None:
    """Make Megatron's Transformer Engine specs build the grouped experts in this process, and leave the other layers.

    Transformer Engine multiplies one expert after another, and its host time grows with their number.
    """
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs

    class Provider(gpt_layer_specs.TESpecProvider):  # type: ignore[misc, name-defined]
        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *given: Any) -> Any:
            return _grouped_experts() if moe_use_grouped_gemm else super().grouped_mlp_modules(False, *given)

    gpt_layer_specs.TESpecProvider = moe_module_specs.TESpecProvider = Provider


@functools.cache
def install() -> None:
    """Make Megatron's Transformer Engine specs build the torch layers in this process."""
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import multi_latent_attention, transformer_block
    from megatron.core.transformer.moe import moe_utils

    # With Transformer Engine installed, routers use its matrix product, which rounds float32 to TensorFloat-32.
    moe_utils.te_general_gemm = None
    gpt_layer_specs.TESpecProvider = moe_module_specs.TESpecProvider = TorchSpecProvider
    gpt_layer_specs.TENorm = transformer_block.LayerNormImpl = Norm
    # MLA passes parallel_mode="duplicated" to this class and gather_output to others.
    multi_latent_attention.TELinear = DuplicatedLinear
    try:
        from megatron.core.transformer import mla_qk_norm_config
    except ImportError:  # before 0.19
        return
    mla_qk_norm_config.get_backend = lambda implementation: TorchSpecProvider()
