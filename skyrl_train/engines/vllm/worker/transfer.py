"""The worker side of the weight sync, in vLLM's update lifecycle (init, start, update, finish).

vLLM imports this module in every worker before the model is loaded, because `SyncExtension` is its
`worker_extension_cls`; importing it registers the weight transfer backend `skyrl` and corrects a kernel of vLLM's. One
class serves vLLM 0.26 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from skyrl_train.device.memory import memory_in_use
from skyrl_train.engines.settings import ADAPTER
from skyrl_train.engines.vllm.worker.adapter_slots import AdapterUpdate, bind, first_adapter
from skyrl_train.engines.vllm.worker.cpu_kernels import replace_cpu_kernels
from skyrl_train.engines.vllm.worker.sleeping import Unsynced, sleepable_bytes
from skyrl_train.engines.vllm.worker.update import ModelUpdate
from skyrl_train.weight_sync.bucket import TensorSpec
from skyrl_train.weight_sync.channels.channel import ReceivingEnd
from skyrl_train.weight_sync.channels.table import open_receiver
from skyrl_train.weight_sync.control import ControlMessage
from skyrl_train.weight_sync.transport import Receiver

BACKEND = "skyrl"


@dataclass
class InitInfo(WeightTransferInitInfo):
    info: ControlMessage
    """`ReceivingEnd.info`."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    message: ControlMessage


class SkyRLWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives and loads tensors; `report` returns what was received."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: VllmConfig, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._update: ModelUpdate | AdapterUpdate = (
            AdapterUpdate() if ADAPTER in vllm_config.additional_config else ModelUpdate(model, vllm_config)
        )
        self._receivers: dict[str, Receiver] = {}
        """One per sender: each pipeline stage of the trainer sends its own tensors."""
        self._digests: dict[str, int] = {}
        self._faults: list[str] | None = None
        """Those of an update that was finished."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        sender = init_info.info["sender"]
        if sender in self._receivers:
            self._receivers.pop(sender).close()
        parallel = self.vllm_config.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._receivers[sender] = Receiver(open_receiver(ReceivingEnd(init_info.info, rank, self.device)))
        self._update.expect(sender, [TensorSpec.from_message(spec) for spec in init_info.info["specs"]])

    def start_weight_update(self) -> None:
        if not self._receivers:
            raise RuntimeError("init_weight_sync was not called on this engine, or its connection was closed")
        self._digests, self._faults = {}, None
        self._update.begin(self.model, self.model_config)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        message = update_info.message
        try:
            self._digests |= self._receivers[message["sender"]].receive(message, self._update.load)
        except BaseException:
            self.shutdown()  # the update has failed for all senders
            raise

    def finish_weight_update(self) -> None:
        self._faults = self._update.faults()  # `finish` hides what is missing
        self._update.finish()

    def report(self) -> dict[str, Any]:
        """Also after `finish_weight_update`."""
        faults = self._update.faults() if self._faults is None else self._faults
        return {"digests": self._digests, "faults": faults}

    def adapter(self) -> dict[str, torch.Tensor]:
        """PEFT's name -> tensor of the last update."""
        assert isinstance(self._update, AdapterUpdate)
        return self._update.tensors

    def shutdown(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()
        self._update.forget_senders()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Abstract in vLLM 0.26; the sender is in `skyrl_train.weight_sync` and does not use vLLM."""
        raise NotImplementedError("weights are sent by skyrl_train.weight_sync")


class SyncExtension:
    """Methods that vLLM adds to its worker, called by name through `collective_rpc`."""

    weight_transfer_engine: SkyRLWeightTransfer

    def skyrl_ping(self) -> bool:
        return True

    def skyrl_sync_report(self) -> dict[str, Any]:
        return self.weight_transfer_engine.report()

    def skyrl_bind_adapter(self, first: bool) -> list[str]:
        """Bind the adapter received last, or the first one, which changes nothing. Returns: faults."""
        config = self.vllm_config  # type: ignore[attr-defined]
        tensors = first_adapter(config) if first else self.weight_transfer_engine.adapter()
        return bind(self.model_runner, tensors, config)  # type: ignore[attr-defined]

    def skyrl_close_update(self) -> None:
        """End a failed update, so that the next can start; the model is unusable until that one is complete."""
        if getattr(self, "_weight_update_active", False):
            self.finish_weight_update()  # type: ignore[attr-defined]

    def skyrl_keep_unsynced(self) -> None:
        self._unsynced: Unsynced | None = Unsynced(self.model_runner.get_model())  # type: ignore[attr-defined]

    def skyrl_restore_unsynced(self) -> None:
        kept, self._unsynced = getattr(self, "_unsynced", None), None
        if kept is not None:
            kept.restore()

    def skyrl_memory(self) -> tuple[dict[str, float], dict[str, float]]:
        can_sleep = self.vllm_config.model_config.enable_sleep_mode  # type: ignore[attr-defined]
        return memory_in_use(), sleepable_bytes() if can_sleep else {}


replace_cpu_kernels()
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SkyRLWeightTransfer)
