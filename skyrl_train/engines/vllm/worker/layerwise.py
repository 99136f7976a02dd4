"""Layer-by-layer loading of weights into a running vLLM model, with a check that everything was loaded.

vLLM's layerwise reload moves the parameters to the meta device, buffers the tensors given to `model.load_weights`, and
processes (fuses, shards, packs) a layer once it has all its elements. From `begin` to `finish` the model cannot run.
vLLM does not report repeated names, names without a parameter, or incomplete layers; this does.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from skyrl_train.engines.vllm.compat import NOT_RELOADED
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import name_list

WRAPPER_NAME = "online_process_loader"
"""vLLM identifies its wrapped weight loaders by this name, and unwraps them by `__wrapped__`."""


class LayerwiseReload:
    """Call begin, load once per bucket, faults, finish; after a failure close, and begin again."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, model_config: Any) -> None:
        self._model, self._vllm_config, self._model_config = model, vllm_config, model_config
        self._aliases = shared_parameters(model)
        self.is_open = False
        """Whether an update has begun and was not finished: the model has no parameters that it can run with."""
        self._received: set[str] = set()
        self._consumed: set[str] = set()
        self._views = _Views([])
        self._touched: dict[int, Any] = {}
        """By identity, vLLM's records of the layers that got something from the bucket being loaded."""

    def close(self) -> None:
        """End an update that was interrupted."""
        if self.is_open:
            self.finish()

    def begin(self) -> None:
        with set_current_vllm_config(self._vllm_config):
            _forget_packed_experts(self._model)
            _allocate_released_weights(self._model)
            self.is_open = True
            initialize_layerwise_reload(self._model)
        self._received, self._consumed = set(), set()
        self._watch_loaders()

    def load(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """Load tensors in checkpoint format, and keep no reference to them.
        Raises: WeightSyncError for a repeated name; the model's own error for an unknown one.
        """
        for name, _ in named_tensors:
            if name in self._received:
                raise WeightSyncError(f"tensor {name!r} arrived twice in one weight update")
            self._received.add(name)
        self._views, self._touched = _Views(named_tensors), {}
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            self._model.load_weights(self._views.feed())  # type: ignore[operator]
            self._clone_buffered_views()
        self._views = _Views([])

    def faults(self) -> list[str]:
        """Sentences about what is missing in the update; to be called before `finish`."""
        unused = sorted(name for name in self._received - self._consumed if name.rsplit(".", 1)[-1] not in NOT_RELOADED)
        found = [f"{len(unused)} tensors belong to no parameter of the engine: {name_list(unused)}"] if unused else []
        missing = list(self._incomplete_layers())
        if missing:
            found.append(f"{len(missing)} layers of the engine did not get all their weights: {name_list(missing)}")
        return found

    def finish(self) -> None:
        """Make the model runnable again, whatever was loaded."""
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            finalize_layerwise_reload(self._model, self._model_config)
            self.is_open = False
            self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """A tied output head would keep using the packed copy of the old weights (vLLM 0.26 to 0.32, CPU)."""
        for name, module in self._model.named_modules():
            method: Any = getattr(module, "quant_method", None)
            if name in self._aliases and hasattr(module, "cpu_linear"):
                method.process_weights_after_loading(module)

    def _watch_loaders(self) -> None:
        """Record which received tensors the weight loaders are called with, and for which layers."""
        for module in self._model.modules():
            info = get_layerwise_info(module)
            for parameter in module._parameters.values():
                loader = getattr(parameter, "weight_loader", None)
                if parameter is not None and getattr(loader, "__name__", "") == WRAPPER_NAME:
                    parameter.weight_loader = self._watched(loader, info)  # type: ignore[attr-defined, arg-type]

    def _watched(self, loader: Callable[..., Any], info: Any) -> Callable[..., Any]:
        @functools.wraps(loader)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._consumed.update(self._views.named_by([*args, *kwargs.values()]))
            self._touched[id(info)] = info
            return loader(*args, **kwargs)

        assert watched.__name__ == WRAPPER_NAME
        return watched

    def _clone_buffered_views(self) -> None:
        """Incomplete layers hold views of the bucket, which is about to be overwritten."""
        for info in self._touched.values():
            for _, bound in info.loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, Tensor) and self._views.holds(value):
                        bound.arguments[key] = value.clone()

    def _incomplete_layers(self) -> Iterator[str]:
        complete = set()
        open_layers = []
        for name, module in self._model.named_modules():
            info = get_layerwise_info(module)
            expected = loadable_elements(module)
            if expected == 0 or isinstance(module, AttentionLayerBase):
                continue
            if not info.can_load() or info.load_numel >= expected:
                complete.add(name)
            else:
                open_layers.append((name, info.load_numel, expected))
        for name, loaded, expected in open_layers:
            if self._aliases.get(name) not in complete:
                yield f"{name} ({loaded} of {expected} elements)"


class _Views:
    """The tensors of one bucket, searchable by the address of their views."""

    def __init__(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        self._named_tensors = named_tensors
        by_address = sorted((tensor.data_ptr(), name) for name, tensor in named_tensors if tensor.numel())
        self._starts = [start for start, _ in by_address]
        self._names = [name for _, name in by_address]
        self._current = ""
        self._range = range(0)
        if named_tensors:
            storage = named_tensors[0][1].untyped_storage()
            self._range = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def feed(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named_tensors:
            self._current = name
            yield name, tensor
        self._named_tensors = []

    def holds(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and tensor.data_ptr() in self._range

    def named_by(self, arguments: list[Any]) -> set[str]:
        """Names of the bucket's tensors among the arguments of a weight loader. If a model passes a transformed copy
        instead of a view, it is of the tensor that it received last.
        """
        views = [argument for argument in arguments if isinstance(argument, Tensor) and self.holds(argument)]
        found = {self._names[bisect.bisect_right(self._starts, view.data_ptr()) - 1] for view in views if view.numel()}
        return found or {self._current}


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """module name -> name of the earlier module that owns the same parameter (a tied output head)."""
    owners: dict[int, str] = {}
    aliases = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None and owners.setdefault(id(parameter), name) != name:
                aliases[name] = owners[id(parameter)]
    return aliases


def loadable_elements(module: nn.Module) -> int:
    """Elements that a checkpoint has for the module's own parameters on this rank, without vocabulary padding."""
    parameters = [
        parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and name not in NOT_RELOADED
    ]
    expected = sum(getattr(parameter, "weight_loader_numel", parameter.numel()) for parameter in parameters)
    if isinstance(module, VocabParallelEmbedding) and parameters:
        rows = module.shard_indices.num_org_elements + module.shard_indices.num_added_elements
        expected = expected // module.num_embeddings_per_partition * rows
    return expected


def _forget_packed_experts(model: nn.Module) -> None:
    """An unquantised MoE layer would copy raw weights into its packed experts (vLLM 0.32, CPU)."""
    if not torch.cuda.is_available():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def _allocate_released_weights(model: nn.Module) -> None:
    """Give a released weight memory again, into which the reload copies the new one.

    Latent attention in bfloat16 on CPUs with AMX keeps a packed copy of kv_b_proj alone (vLLM 0.32).
    """
    for module in model.modules():
        projection: Any = getattr(module, "kv_b_proj", None)
        if getattr(module, "is_amx_bmm_enabled", False) and projection.weight.numel() == 0:
            shape = projection.output_size_per_partition, projection.input_size_per_partition
            weight = torch.empty(shape, dtype=projection.params_dtype)
            projection.weight = nn.Parameter(weight, requires_grad=False)
