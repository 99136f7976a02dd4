"""Weight updates of one worker: layerwise reload (slow path) until direct copies (fast path) are proven equivalent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """Call expect once per sender, then for each update begin, load once per bucket, faults, finish; begin again also
    after a failure.

    What is expected yields a plan. The first update takes the slow path and checks the plan, later ones use it. A model
    without a plan always takes the slow path.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._expected: dict[str, Sequence[TensorSpec]] = {}
        """By sender."""
        self._specs: dict[str, TensorSpec] = {}
        """By name, of all senders: what a plan was or will be looked for with."""
        self._use(model, vllm_config.model_config)

    def _use(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._layerwise = LayerwiseReload(model, self._vllm_config, model_config)
        self._loader: LayerwiseReload | CopyPlan = self._layerwise
        self._plan: CopyPlan | None = None
        self.copies_directly = False
        """Whether the plan was verified, and updates take the fast path."""
        self._why_not: str | None = None
        """Why there is no plan; None if none was looked for."""
        self._logged: str | None = None
        """The last reason that was logged."""
        self._check: PlanCheck | None = None
        self._deriving: list[Any] = [module for module in model.modules() if derives(module)]

    def expect(self, sender: str, specs: Sequence[TensorSpec]) -> None:
        """Note what a sender sends in each update, and look for a plan: here and not in the update, because it takes
        time and no update has paused the engine yet. There is none before the last sender has connected.
        """
        self._expected[sender] = specs
        expected = {spec.name: spec for some in self._expected.values() for spec in some}
        if expected == self._specs:
            return
        self._specs = expected
        self._plan, self._check, self.copies_directly, self._why_not = None, None, False, None
        if not self._layerwise.is_open:
            self._find_plan()

    def forget_senders(self) -> None:
        """To be called when all are gone: others may send something else."""
        self._expected.clear()

    def begin(self, model: nn.Module, model_config: Any) -> None:
        """Args: model: the model to load into; it changes for vLLM's draft models."""
        self._layerwise.close()
        if model is not self._model:
            self._use(model, model_config)
        if self._plan is None and self._why_not is None:
            self._find_plan()
        if self._plan is not None and not self._plan.is_current:
            self._reject_plan("its parameters have moved")
        if self._why_not not in (None, self._logged):
            log.info("weights are loaded layer by layer, not by direct copies: %s", self._why_not)
            self._logged = self._why_not
        self._check, self._loader = None, self._layerwise
        if self._plan is not None and self.copies_directly:
            self._loader = self._plan
        elif self._plan is not None:
            self._check = PlanCheck(self._plan)
        self._loader.begin()

    def load(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """Load one bucket of tensors in checkpoint format, and keep no reference to them.
        Raises: WeightSyncError for a repeated name; the model's own error for an unknown one.
        """
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
        if is_complete and self._check is not None:
            self.copies_directly = self._check.passed()
            if not self.copies_directly:
                self._reject_plan("its parameters are not in the checkpoint's form")

    def _find_plan(self) -> None:
        if self._model_config.quantization is not None:
            self._reject_plan("the engine quantises them")
            return
        try:
            with set_current_vllm_config(self._vllm_config):
                aliases = shared_parameters(self._model)
                self._plan = find_plan(self._model, list(self._specs.values()), loadable_elements, aliases)
        except NoPlanError as reason:
            self._reject_plan(str(reason))

    def _reject_plan(self, reason: str) -> None:
        self._plan, self.copies_directly, self._why_not = None, False, reason

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
