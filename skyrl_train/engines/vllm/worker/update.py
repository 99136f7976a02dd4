"""One worker's updates: the long way (reload.py) until it is proven that plain copies (direct.py) do the same."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from skyrl_train.engines.vllm.worker.copy_plan import CopyPlan, NoPlanError, Trial, find_plan
from skyrl_train.engines.vllm.worker.layerwise import LayerwiseReload, loadable_elements, shared_parameters
from skyrl_train.weight_sync.bucket import TensorSpec

log = logging.getLogger(__name__)


class ModelUpdate:
    """begin, load as often as needed, faults, finish; begin again also after a failure.

    The first update goes the long way and yields a plan, the second shows whether the plan is right, and from the
    third on the plan is used. A model that has no plan goes the long way for ever.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._use(model, vllm_config.model_config)

    def _use(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._long_way = LayerwiseReload(model, self._vllm_config, model_config)
        self._plan: CopyPlan | None = None
        self._plan_is_proven = False
        self._may_have_plan = model_config.quantization is None
        self._trial: Trial | None = None
        self._specs: list[TensorSpec] = []

    @property
    def _is_direct(self) -> bool:
        return self._plan is not None and self._plan_is_proven

    def begin(self, model: nn.Module, model_config: Any) -> None:
        """Args: what to load into; another model than last time for vLLM's draft models."""
        if model is not self._model:
            self._use(model, model_config)
        self._specs = []
        if self._plan is not None and not self._plan.is_of(self._model):
            self._forget_plan("its parameters have moved")
        self._trial = None if self._plan is None or self._plan_is_proven else Trial(self._plan)
        if self._is_direct:
            assert self._plan is not None
            self._plan.begin()
        else:
            self._long_way.begin()

    def load(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """Load the tensors of one bucket, in checkpoint format. None of them is referenced any more when this returns.

        Raises: WeightSyncError for a name that came before; whatever the model raises for a name it does not know.
        """
        if self._is_direct:
            assert self._plan is not None
            self._plan.load(named_tensors)
            return
        self._specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors]
        if self._trial is not None:
            self._trial.watch(named_tensors)
        self._long_way.load(named_tensors)

    def faults(self) -> list[str]:
        """What keeps the update from being complete, as sentences; to be asked before `finish`."""
        if self._is_direct:
            assert self._plan is not None
            return self._plan.faults()
        return self._long_way.faults()

    def num_parameters(self) -> int:
        return sum(1 for _ in self._model.parameters())

    def finish(self) -> None:
        """Make the model runnable again, with whatever was loaded."""
        if self._is_direct:
            self._derive()
            return
        is_whole = not self._long_way.faults()
        self._long_way.finish()
        if is_whole and self._may_have_plan:
            self._learn()

    def _learn(self) -> None:
        """From a complete update that went the long way."""
        if self._trial is not None:
            self._plan_is_proven = self._trial.passed(self._model)
            if not self._plan_is_proven:
                self._forget_plan("its parameters are not in the checkpoint's form")
            return
        try:
            with set_current_vllm_config(self._vllm_config):
                aliases = shared_parameters(self._model)
                self._plan = find_plan(self._model, self._specs, loadable_elements, aliases)
        except NoPlanError as reason:
            self._forget_plan(str(reason))

    def _forget_plan(self, reason: str) -> None:
        log.info("weights are loaded layer by layer: %s", reason)
        self._plan, self._may_have_plan = None, False

    def _derive(self) -> None:
        """What attention layers compute from their weights (multi-latent attention: two matrices of kv_b_proj)."""
        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            for module in self._model.modules():
                if isinstance(module, AttentionLayerBase) and hasattr(module, "process_weights_after_loading"):
                    module.process_weights_after_loading(self._model_config.dtype)
