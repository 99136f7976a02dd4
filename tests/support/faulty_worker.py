"""A worker whose LoRA slots do not take what they are given, to see that it is noticed."""

from __future__ import annotations

from typing import Any

from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from skyrl_train.engines.vllm.worker.transfer import SyncExtension

SET_LORA = BaseLinearLayerWithLoRA.set_lora


class FaultySlots(SyncExtension):
    def skyrl_lose_slots(self) -> None:
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        self._lost, manager.modules = manager.modules, {}

    def skyrl_find_slots(self) -> None:
        self.model_runner.lora_manager._adapter_manager.modules = self._lost  # type: ignore[attr-defined]

    def skyrl_spoil_slots(self) -> None:
        """From now on every slot of a plain layer has B's first number wrong."""

        def wrong(layer: Any, index: int, lora_a: Any, lora_b: Any) -> None:
            SET_LORA(layer, index, lora_a, lora_b)
            layer.lora_b_stacked[0][index, 0, 0, 0] += 1

        BaseLinearLayerWithLoRA.set_lora = wrong

    def skyrl_repair_slots(self) -> None:
        BaseLinearLayerWithLoRA.set_lora = SET_LORA
