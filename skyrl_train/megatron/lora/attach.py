"""Freeze a Megatron model and give its linear layers the adapters of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from mbridge.core.bridge import Bridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from skyrl_train.config.policy import LoraConfig
from skyrl_train.hf.adapter import initial_factors, linear_shapes, targets
from skyrl_train.hf.adapter_file import AdapterFile
from skyrl_train.megatron.lora.adapters import Adapter, Lora, Site, base_weights
from skyrl_train.megatron.lora.dropout import seed_dropout
from skyrl_train.megatron.weights.gather import gather_json, shard_group

LINEAR = re.compile(r"\.linear_\w+$")
"""Local names of Megatron's layers for one or several Hugging Face linear layers."""


def attach(chunks: list[GPTModel], bridge: Bridge, folder: str, lora: LoraConfig, seed: int) -> Lora:
    """Attach adapters to the chunks, whose weights are loaded already, and freeze everything else.

    The adapters of `lora.path`, or new ones without effect. A collective over the pipeline and expert groups.

    Raises: ValueError on all ranks if targets match nothing, or the adapter does not fit.
    """
    chosen = targets(linear_shapes(folder), lora)
    if lora.path is None:
        start = lambda module: initial_factors(module, chosen[module], lora, seed)  # noqa: E731
    else:
        start = AdapterFile(lora.path, folder, lora).factors
    if lora.dropout > 0:
        seed_dropout(seed)
    result = Lora(lora)
    held: list[set[str]] = []
    for chunk in chunks:
        chunk.requires_grad_(False)
        held.append(set())
        for layer, site in list(_sites(chunk, bridge, chosen)):
            adapter = Adapter(
                layer, site, lora, result.switch, start, sequence_parallel=bridge.config.sequence_parallel
            )
            layer.lora = adapter
            result.adapters.append((layer, adapter))
            held[-1] |= {module for modules in site.modules for module in modules}
        if bridge.config.recompute_granularity is not None and hasattr(chunk, "embedding"):
            # Reentrant checkpointing computes no gradients unless one of its inputs requires one.
            chunk.embedding.register_forward_hook(_require_gradient)
    _require_all_held(held, set(chosen))
    return result


def _require_gradient(module: Any, args: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _sites(chunk: GPTModel, bridge: Bridge, chosen: dict[str, tuple[int, int]]) -> Iterator[tuple[Any, Site]]:
    global_names = bridge._weight_name_mapping_mcore_local_to_global(chunk, consider_ep=False)
    for name, layer in chunk.named_modules():
        if not LINEAR.search(name):
            continue
        weights = base_weights(layer)
        is_expert = ".mlp.experts." in name
        first = global_names[f"{name}.weight0" if is_expert else f"{name}.weight"]
        stem = first.removesuffix("0") if is_expert else first
        names = [f"{stem}{index}" for index in range(bridge.config.num_moe_experts)] if is_expert else [stem]
        parts = [[hf.removesuffix(".weight") for hf in bridge._weight_name_mapping_mcore_to_hf(name)] for name in names]
        adapted = [tuple(index for index, module in enumerate(modules) if module in chosen) for modules in parts]
        if len(set(adapted)) > 1:
            raise ValueError(
                f"trainer.policy.model.lora.target_modules matches only some of the experts of {parts[0][0]}'s layer. "
                "Target all experts of a layer"
            )
        if not adapted[0]:
            continue
        num_parts = len(parts[0])
        axis = int(weights[0].partition_dim) if getattr(weights[0], "tensor_model_parallel", False) else None
        out_size = weights[0].shape[0] * (shard_group(is_expert=is_expert).size() if axis == 0 else 1)
        index_of_part = torch.full((num_parts,), -1)
        index_of_part[list(adapted[0])] = torch.arange(len(adapted[0]))
        yield (
            layer,
            Site(
                modules=tuple(tuple(part[index] for index in adapted[0]) for part in parts),
                part_of_row=index_of_part[_part_of_row(out_size, num_parts, bridge.hf_config)],
                shard_axis=axis,
                is_gated=num_parts == 2,
                is_expert=is_expert,
                num_local=len(weights),
            ),
        )


def _part_of_row(out_size: int, num_parts: int, hf_config: Any) -> torch.Tensor:
    """[out] int64: index of the Hugging Face module of each row of a whole Megatron weight."""
    if num_parts == 3:
        # Per group of heads that share a key: its queries, its key, its value.
        queries = hf_config.num_attention_heads // hf_config.num_key_value_heads
        part_of_head = torch.tensor([0] * queries + [1, 2]).repeat_interleave(hf_config.head_dim)
        return part_of_head.repeat(hf_config.num_key_value_heads)
    return torch.arange(num_parts).repeat_interleave(out_size // num_parts)


def _require_all_held(held: list[set[str]], chosen: set[str]) -> None:
    """Raises: ValueError if a target is on no rank, or a stage has none, which Megatron cannot train."""
    found, is_bare = set().union(*held), any(not modules for modules in held)
    for group in (parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        parts = gather_json((sorted(found), is_bare), group)
        found, is_bare = set().union(*(names for names, _ in parts)), any(bare for _, bare in parts)
    if missing := sorted(chosen - found):
        raise ValueError(
            f"trainer.policy.model.lora.target_modules names {missing[0]}, which is not a layer of Megatron's model"
        )
    if is_bare:
        raise ValueError(
            "trainer.policy.model.lora.target_modules leaves a pipeline stage without an adapter. Target modules of "
            "every layer, or use fewer stages"
        )
