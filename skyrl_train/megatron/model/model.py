"""Hugging Face checkpoint -> Megatron model chunks in their data-parallel wrapper."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from mbridge.core.bridge import Bridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module

from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.device import device, device_type
from skyrl_train.hf.hub import local_folder
from skyrl_train.megatron.layers import experts, layers, permute, rope, swiglu, weight_gradient
from skyrl_train.megatron.layers.balance import Balance
from skyrl_train.megatron.lora.adapters import Lora
from skyrl_train.megatron.lora.attach import attach
from skyrl_train.megatron.model.bridge import build_bridge, check_all_weights_are_read, match_hugging_face
from skyrl_train.megatron.model.load import load_weights
from skyrl_train.megatron.model.output_layer import return_hidden_states
from skyrl_train.megatron.model.value_head import add_value_head


@dataclass(frozen=True, slots=True)
class Model:
    """The part of the model that this rank holds."""

    chunks: list[Any]
    """One DistributedDataParallel (or bare module) per virtual pipeline stage."""
    bridge: Bridge
    names: list[dict[str, str]]
    """Per chunk: local name of a tensor -> name in the whole model, where experts count from 0 on every rank. Built
    once: mbridge creates a state_dict for it, a quarter of the host's time of an export."""
    dtype: torch.dtype
    torch_layers: bool
    logprobs_chunk_size: int | None = None
    """See `MegatronConfig`."""
    recompute_logits: bool | None = None
    """See `MegatronConfig`."""
    balance: Balance | None = None
    """The load-balancing loss of its routers, if used."""
    lora: Lora | None = None
    """Its adapters, if only they are trained."""

    @property
    def modules(self) -> list[GPTModel]:
        """The GPTModel in each chunk."""
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def vocab_size(self) -> int:
        """Vocabulary size without padding rows, which the embedding may have for tensor parallelism."""
        return int(self.bridge.hf_config.vocab_size)


def unwrap(module: Any) -> GPTModel:
    while hasattr(module, "module"):
        module = module.module
    return module


def uses_torch_layers(transformer_impl: str, dtype: torch.dtype) -> bool:
    """Whether `transformer_impl` selects the torch layers on this machine.
    Raises: ValueError if Transformer Engine is requested and missing, or with float32.
    """
    present = device_type() == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "transformer_engine" and not present:
        raise ValueError(
            "trainer.policy.megatron_config.transformer_impl=transformer_engine needs a GPU and "
            "`pip install skyrl_train[te]`. Use auto or torch"
        )
    if transformer_impl == "transformer_engine" and dtype == torch.float32:
        # It (2.20) also has no float32 attention over samples with padding between them (TP2 with SP).
        raise ValueError("Transformer Engine rounds float32 to TensorFloat-32. Use auto or torch, or bfloat16")
    return transformer_impl == "torch" or not present or dtype == torch.float32


def build_model(
    path: str,
    config: MegatronConfig,
    dtype: torch.dtype,
    *,
    trainable: bool,
    lora: LoraConfig | None = None,
    seed: int = 0,
    value_head: str | None = None,
) -> Model:
    """Load the Hugging Face checkpoint at `path` into this rank's part of a Megatron model.

    A hub model must be in this node's cache. A trainable model is wrapped in Megatron's DistributedDataParallel
    with float32 gradients; a reference is not. With `lora` (of a rank above 0) only adapters are trained, which `seed`
    initialises. With `value_head` the output layer is a ValueHead of this name, read from the checkpoint or new.

    Raises: ValueError for a model or an adapter that would not be computed as in Hugging Face and PEFT.
    """
    torch_layers = uses_torch_layers(config.transformer_impl, dtype)
    weight_gradient.install()
    rope.install()
    swiglu.install()
    permute.install()
    if torch_layers:
        layers.install()
    else:
        layers.install_experts()
    folder = local_folder(path)
    bridge = build_bridge(folder, config, dtype, torch_layers=torch_layers)
    bare = _build_chunks(bridge, has_head=value_head is None)
    load_weights(bridge, bare, folder)
    if value_head is not None:
        add_value_head(bridge, bare[-1], folder, value_head, seed)
    else:
        return_hidden_states(bare[-1])
    check_all_weights_are_read(bridge, bare, folder)
    for chunk in bare:
        match_hugging_face(chunk, bridge.hf_config)
        if config.freeze_moe_router:
            for name, parameter in chunk.named_parameters():
                if ".router." in name:
                    parameter.requires_grad = False
    adapters = attach(bare, bridge, folder, lora, seed) if lora is not None and lora.rank > 0 else None
    chunks = [_in_half_precision(chunk, bridge.config) if dtype == torch.bfloat16 else chunk for chunk in bare]
    if trainable:
        chunks = _wrap_data_parallel(chunks, bridge.config)
    else:
        for chunk in chunks:
            chunk.requires_grad_(False).eval()
    balanced = trainable and config.moe_aux_loss_coeff > 0 and bridge.config.num_moe_experts is not None
    return Model(
        chunks=chunks,
        bridge=bridge,
        names=[bridge._weight_name_mapping_mcore_local_to_global(unwrap(one), consider_ep=False) for one in chunks],
        dtype=dtype,
        torch_layers=torch_layers,
        logprobs_chunk_size=config.logprobs_chunk_size,
        recompute_logits=config.recompute_logits,
        balance=Balance(bare, config.moe_aux_loss_coeff) if balanced else None,
        lora=adapters,
    )


def _in_half_precision(chunk: GPTModel, config: Any) -> Float16Module:
    """Megatron's bfloat16 wrapper, which would round the routers' float32 bias and with it the choice of experts."""
    biases = {name: buffer.clone() for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")}
    wrapped = Float16Module(config, chunk)
    for name, buffer in chunk.named_buffers():
        if name in biases:
            buffer.data = biases[name]
    return wrapped


def _build_chunks(bridge: Bridge, *, has_head: bool) -> list[GPTModel]:
    """Args: has_head: False leaves out the language model's head."""
    if not has_head:
        bridge.hf_config.tie_word_embeddings = False
    provider = bridge._model_provider([])
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(virtual_size or 1):
        vp_stage = stage if virtual_size else None
        chunk = provider(
            parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunk.vp_stage = vp_stage
        if not has_head and chunk.post_process:
            chunk.output_layer = None
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.to(device()))
    return chunks


def _wrap_data_parallel(chunks: list[Any], config: Any) -> list[DistributedDataParallel]:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=device_type() == "cuda" and parallel_state.get_data_parallel_world_size() > 1,
    )
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=settings, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped if settings.overlap_grad_reduce else []:
        for module in chunk.modules():
            if isinstance(module, experts.GroupedLinear):
                experts.reduce_together(chunk, module)
    return wrapped


def dtype_of(bf16: bool) -> torch.dtype:
    return torch.bfloat16 if bf16 else torch.float32
