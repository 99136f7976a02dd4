"""The policy's adapter in vLLM's LoRA slots: loaded from memory in every worker, used by every request.

vLLM reads adapters from folders. Here the tensors come with the weight sync (before the first one, from the base
model's shapes), and the contents of the slots are compared with them.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_train.config.policy import LoraConfig
from skyrl_train.engines.settings import ADAPTER
from skyrl_train.engines.vllm.compat import rename_mapper
from skyrl_train.hf.adapter import identity_adapter, linear_shapes, targets, tensor_names
from skyrl_train.weight_sync.bucket import TensorSpec
from skyrl_train.weight_sync.control import WeightSyncError

ADAPTER_ID = 1
MODULES = ("target_modules", "exclude_modules")
IN_MEMORY = "/nonexistent/adapter-in-memory"
"""Path of a request's adapter: if a worker had no adapter in its slot, vLLM would fail to load this."""


class AdapterUpdate:
    """Has the interface of ModelUpdate, but leaves the model unchanged and keeps the tensors until they are bound."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def expect(self, sender: str, specs: Sequence[TensorSpec]) -> None:
        """Nothing follows from them."""

    def forget_senders(self) -> None: ...

    def begin(self, *_: Any) -> None:
        self.tensors = {}

    def load(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copies the tensors, which are views of a bucket."""
        self.tensors |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_tensors}

    def finish(self) -> None:
        """Binding is a separate call: vLLM (0.32) removes all adapters when an update ends."""

    def faults(self) -> list[str]:
        return [] if self.tensors else ["no adapter tensor was received"]


def first_adapter(vllm_config: Any) -> dict[str, Tensor]:
    """PEFT's name -> tensor of an adapter that changes nothing."""
    return dict(identity_adapter(vllm_config.model_config.model, _lora_of(vllm_config)))


def _lora_of(vllm_config: Any) -> LoraConfig:
    values = vllm_config.additional_config[ADAPTER]
    names = {name: None if values[name] is None else tuple(values[name]) for name in MODULES}
    return LoraConfig(**{field.name: (values | names)[field.name] for field in fields(LoraConfig)})


def bind(model_runner: Any, tensors: Mapping[str, Tensor], vllm_config: Any) -> list[str]:
    """Load the adapter into the slot that requests use.
    Args: tensors: by PEFT's names; model_runner: the worker's.
    Returns: why the slots do not hold the complete adapter, as sentences.
    """
    if not tensors:
        return ["no adapter tensor was received; the engine would serve the base model"]
    lora = _lora_of(vllm_config)
    expected = targets(linear_shapes(vllm_config.model_config.model), lora)
    if missing := [name for module in expected for name in tensor_names(module) if name not in tensors]:
        return [f"{len(missing)} tensors of the adapter were not received: {', '.join(missing[:4])}"]
    slots = model_runner.lora_manager
    manager = slots._adapter_manager
    modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    helper = PEFTHelper.from_dict({"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": modules})
    helper.validate_legal(slots.lora_config)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        dict(tensors),
        helper,
        device="cpu",
        dtype=slots.lora_config.lora_dtype,
        model_vocab_size=slots.vocab_size,
        weights_mapper=rename_mapper(manager.model),
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    # Loading packs q, k and v (and others) under the name of the fused layer.
    unbound = sorted(name for name in adapter.loras if name not in manager.modules)
    bound = [name for name in adapter.loras if name in manager.modules]
    faults = []
    if unbound or not bound:
        faults.append(
            f"the adapter was bound to {len(bound)} layers, and {len(unbound)} modules have no LoRA slot: "
            f"{', '.join(unbound[:4])}. Exclude them with trainer.policy.model.lora.exclude_modules, or set "
            "lora.sync=merged"
        )
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    wrong = [name for name in bound if not _holds(manager.modules[name], slot, adapter.loras[name])]
    if wrong:
        faults.append(f"LoRA slots hold other values than were sent: {', '.join(wrong[:4])}")
    return faults


def _holds(layer: Any, slot: int, lora: Any) -> bool:
    """Whether the slot holds exactly the adapter's values. Not checked for layers that shard it among ranks, nor for
    experts with gate and up in one tensor (FusedMoE3DWithLoRA).
    """
    if type(layer) is FusedMoEWithLoRA and layer.tp_size == 1:
        gate_up_a, gate_up_b = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
        buffers = (gate_up_a[0], *layer.w2_lora_a_stacked, *gate_up_a[1:])
        buffers += (gate_up_b[0], *layer.w2_lora_b_stacked, *gate_up_b[1:])
        return all(
            torch.equal(stacked[slot, :, : value.shape[1], : value.shape[2]].cpu(), value.to(stacked.dtype))
            for stacked, value in zip(buffers, (*lora.lora_a, *lora.lora_b), strict=True)
        )
    if not isinstance(layer, BaseLinearLayerWithLoRA) or layer.tp_size > 1:
        return True

    def listed(value: Any) -> list[Tensor | None]:
        return list(value) if isinstance(value, list | tuple) else [value]

    def same(stacked: Tensor, value: Tensor | None) -> bool:
        held = stacked[slot, 0]
        if value is None:
            return not bool(held.any())
        rows, columns = value.shape
        return torch.equal(held[:rows, :columns].cpu(), value.to(held.dtype))

    pairs = [(layer.lora_a_stacked, lora.lora_a), (layer.lora_b_stacked, lora.lora_b)]
    return all(
        same(stacked, value)
        for buffers, values in pairs
        for stacked, value in zip(buffers, listed(values), strict=True)
    )


class EveryRequest:
    """Adds the adapter to every request of an AsyncLLM, of rollouts and of HTTP clients."""

    def __init__(self, llm: AsyncLLM) -> None:
        # Weak: vLLM ends its processes with the last reference to it.
        self._llm = weakref.ref(llm)
        self._request: LoRARequest | None = None
        llm.generate = self._with_adapter  # type: ignore[method-assign]

    def serve(self, name: str) -> None:
        """Add the adapter to requests from now on. Args: name: distinguishes versions in the prefix cache."""
        self._request = LoRARequest(name, ADAPTER_ID, IN_MEMORY)

    def _with_adapter(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        if self._request is None:
            raise WeightSyncError("the engine has no adapter yet: it would answer with the base model")
        llm = self._llm()
        assert llm is not None
        return AsyncLLM.generate(llm, *args, **(kwargs | {"lora_request": self._request}))
