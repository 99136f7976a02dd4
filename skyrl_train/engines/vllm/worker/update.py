"""Weight updates of one worker: layerwise reload (slow path) until direct copies (fast path) are proven equivalent."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionImpl

from skyrl_train.engines.vllm.worker.copy_plan import CopyPlan, NoPlanError, PlanCheck, find_plan
from skyrl_train.engines.vllm.worker.layerwise import LayerwiseReload, loadable_elements, shared_parameters
from skyrl_train.weight_sync.bucket import TensorSpec

log = logging.getLogger(__name__)


class ModelUpdate:
    """Call begin, load once per bucket, faults, finish; begin again also after a failure.

    The first update takes the slow path and yields a plan, the second checks the plan, and later ones use it. A model
    without a plan always takes the slow path.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._use(model, vllm_config.model_config)

    def _use(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._layerwise = LayerwiseReload(model, self._vllm_config, model_config)
        self._loader: LayerwiseReload | CopyPlan = self._layerwise
        self._plan: CopyPlan | None = None
        self._verified_plan: CopyPlan | None = None
        self._may_have_plan = model_config.quantization is None
        self._check: PlanCheck | None = None
        self._specs: list[TensorSpec] = []
        self._deriving: list[Any] = [module for module in model.modules() if derives(module)]

    def begin(self, model: nn.Module, model_config: Any) -> None:
        """Args: model: the model to load into; it changes for vLLM's draft models."""
        if model is not self._model:
            self._use(model, model_config)
        if self._plan is not None and not self._plan.is_of(self._model):
            self._reject_plan("its parameters have moved")
        self._specs = []
        self._check = None if self._plan is None else PlanCheck(self._plan)
        self._loader = self._verified_plan or self._layerwise
        self._loader.begin()

    def load(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """Load one bucket of tensors in checkpoint format, and keep no reference to them.
        Raises: WeightSyncError for a repeated name; the model's own error for an unknown one.
        """
        if self._loader is self._layerwise:
            self._specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]
            if self._check is not None:
                self._check.watch(named_tensors)
        self._loader.load(named_tensors)

    def faults(self) -> list[str]:
        """Sentences about what is missing in the update; to be called before `finish`."""
        return self._loader.faults()

    def finish(self) -> None:
        """Make the model runnable again, whatever was loaded."""
        if self._loader is not self._layerwise:
            self._derive()
            return
        is_complete = not self._layerwise.faults()
        self._layerwise.finish()
        if is_complete and self._may_have_plan:
            self._find_or_verify_plan()

    def _find_or_verify_plan(self) -> None:
        if self._check is not None:
            if self._check.passed(self._model):
                self._verified_plan = self._plan
            else:
                self._reject_plan("its parameters are not in the checkpoint's form")
            return
        try:
            with set_current_vllm_config(self._vllm_config):
                aliases = shared_parameters(self._model)
                self._plan = find_plan(self._model, self._specs, loadable_elements, aliases)
        except NoPlanError as reason:
            self._reject_plan(str(reason))

    def _reject_plan(self, reason: str) -> None:
        log.info("weights are loaded layer by layer, not by direct copies: %s", reason)
        self._plan, self._verified_plan, self._may_have_plan = None, None, False

    def _derive(self) -> None:
        """Recompute what attention layers derive from weights (multi-latent attention: two matrices of kv_b_proj)."""
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            for module in self._deriving:
                module.process_weights_after_loading(self._model_config.dtype)


def derives(module: Any) -> bool:
    """Whether a module is an attention layer that derives something from weights. vLLM's usual one (0.26 to 0.33) only
    sets the default scales again, by four kernels per layer, unless its implementation does more.
    """
    if not isinstance(module, AttentionLayerBase) or not hasattr(module, "process_weights_after_loading"):
        return False
    if type(module).process_weights_after_loading is not Attention.process_weights_after_loading:
        return True
    return type(module.impl).process_weights_after_loading is not AttentionImpl.process_weights_after_loading
