"""Checks of the models from their config.json alone: whether they exist and fit the parallel layout."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from skyrl_train.checks.training import MODEL
from skyrl_train.config import Config
from skyrl_train.config.policy import OWN_STAGES, MegatronConfig


def model_problems(config: Config) -> Iterator[str]:
    """Missing folders, sizes that do not divide, lengths beyond the model's positions. Hub names are not checked."""
    policy = config.trainer.policy
    shape = yield from _shape(policy.model.path, MODEL)
    if shape is not None:
        yield from size_problems(shape, policy.megatron_config, "trainer.policy.megatron_config")
        yield from engine_size_problems(shape, config)
    for model in config.trainer.scoring_models:
        own = shape
        if model.model_path != policy.model.path:
            own = yield from _shape(model.model_path, model.path_key)
        is_same = (model.model_path, model.megatron_config) == (policy.model.path, policy.megatron_config)
        if own is not None and not is_same:
            yield from size_problems(own, model.megatron_config, f"{model.key}.megatron_config")


def served_model_problems(config: Config) -> Iterator[str]:
    """The problems of a model that engines alone load."""
    shape = yield from _shape(config.trainer.policy.model.path, MODEL)
    if shape is not None:
        yield from engine_size_problems(shape, config)


def cut_problems(model_path: str, key: str, megatron: MegatronConfig, path: str) -> Iterator[str]:
    """Why the model at `model_path` (with its key) cannot have the layout `megatron` (with its key `path`)."""
    shape = yield from _shape(model_path, key)
    if shape is not None:
        yield from size_problems(shape, megatron, path)


def looks_local(path: str) -> bool:
    """Whether a model path means a folder: hub names are `name` or `organisation/name`."""
    parent = Path(path).parent
    has_parent = str(parent) != "." and parent.is_dir()
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or has_parent or Path(path).exists()


def _shape(path: str, key: str) -> Generator[str, None, dict[str, Any] | None]:
    """Yields problems; returns the model's config.json, or None for a hub name or where there is none."""
    if not looks_local(path):
        return None
    if not Path(path).is_dir():
        expanded = Path(path).expanduser()
        remedy = (
            f"Write {expanded}" if expanded.is_dir() else "Name the folder of a Hugging Face checkpoint, or a hub name"
        )
        yield f"{key} is {path}: there is no such folder in {Path.cwd()}. {remedy}"
        return None
    try:
        values = json.loads(Path(path, "config.json").read_text())
    except FileNotFoundError:
        yield f"{key} is {path}: not a Hugging Face checkpoint (no config.json)"
        return None
    except (ValueError, OSError) as error:
        yield f"{key} is {path}: its config.json cannot be read ({error})"
        return None
    if not isinstance(values, dict):
        yield f"{key} is {path}: its config.json holds a {type(values).__name__}, not an object. Copy the model again"
        return None
    return values.get("text_config", values)


def size_problems(shape: dict[str, Any], megatron: MegatronConfig, path: str) -> Iterator[str]:
    """Like `cut_problems`, of a model with this config.json."""
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    vpp = megatron.virtual_pipeline_model_parallel_size or 1
    heads, kv_heads = shape.get("num_attention_heads"), shape.get("num_key_value_heads")
    if heads is not None and heads % tp:
        yield f"{path}.tensor_model_parallel_size is {tp}: it must divide the model's {heads} attention heads"
    elif kv_heads is not None and kv_heads % tp and tp % kv_heads:
        yield (
            f"{path}.tensor_model_parallel_size is {tp}: it must divide the model's {kv_heads} key-value heads, or be "
            "a multiple of them"
        )
    layers = shape.get("num_hidden_layers")
    stages = pp * vpp
    own = {name: value for name, value in megatron.transformer_config_kwargs.items() if name in OWN_STAGES}
    if layers is not None and not any(own.values()):
        interleaved = f" x virtual_pipeline_model_parallel_size {vpp}" if vpp > 1 else ""
        cut = f"{path}.pipeline_model_parallel_size {pp}{interleaved} is {stages} stages"
        if layers < stages:
            yield f"{cut}: more than the model's {layers} layers. Each stage needs one"
        elif own and layers % stages:
            yield (
                f"{cut}: they must divide the model's {layers} layers, because "
                f"transformer_config_kwargs.{next(iter(own))} requests even stages. Remove it"
            )
    experts = next((shape[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if shape.get(k)), None)
    ep = megatron.expert_model_parallel_size
    if ep > 1 and experts is None:
        yield f"{path}.expert_model_parallel_size is {ep}: the model has no experts. Set it to 1"
    elif experts is not None and experts % ep:
        yield f"{path}.expert_model_parallel_size is {ep}: it must divide the model's {experts} experts"
    latent = shape.get("kv_lora_rank") is not None
    if tp > 1 and not megatron.sequence_parallel and (experts is not None or latent):
        kind = "experts" if experts is not None else "multi-latent attention"
        yield f"{path}.sequence_parallel is false: a model with {kind} needs it with tensor parallelism. Set it to true"
    for kind, size, name, width in _widths(shape, megatron, has_experts=experts is not None):
        if width % size:
            yield f"{path}.{kind}_parallel_size is {size}: it must divide the model's {name} {width}"


def _widths(
    shape: dict[str, Any], megatron: MegatronConfig, *, has_experts: bool
) -> Iterator[tuple[str, int, str, int]]:
    """Kind of parallelism that shards an MLP, its size, and name and value of the MLP's width; 0 without such MLPs."""
    tp = megatron.tensor_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    names = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"
    dense, expert, shared, num_shared = (shape.get(name) or 0 for name in names)
    if shape.get("model_type") == "mixtral":
        yield "expert_tensor", etp, names[0], dense
        return
    first_dense = shape.get("first_k_dense_replace", "n_routed_experts" in shape)
    if not has_experts or "dense" in (shape.get("mlp_layer_types") or ["dense"] * (first_dense or 0)):
        yield "tensor_model", tp, names[0], dense
    yield "expert_tensor", etp, names[1], expert
    yield "tensor_model", tp, names[2], shared
    yield "tensor_model", tp, f"{names[3]} x {names[1]}", num_shared * expert


def engine_size_problems(shape: dict[str, Any], config: Config) -> Iterator[str]:
    """Why engines cannot serve a model with this config.json."""
    generator = config.generator
    tp, heads = generator.inference_engine_tensor_parallel_size, shape.get("num_attention_heads")
    if heads is not None and heads % tp:
        yield (
            f"generator.inference_engine_tensor_parallel_size is {tp}: it must divide the model's {heads} "
            "attention heads"
        )
    positions = shape.get("max_position_embeddings")
    if positions is not None and (longest := generator.longest_conversation) > positions:
        yield (
            f"generator.max_input_length {generator.max_input_length} + max_generate_length "
            f"{longest - generator.max_input_length} is {longest} tokens: more than the model's {positions} positions. "
            "Lower one of them"
        )
