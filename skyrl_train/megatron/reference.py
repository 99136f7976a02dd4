"""Logprobs of a whole TrainBatch; the frozen model of the KL term."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.device import device
from skyrl_train.megatron.model.model import Model, build_model, dtype_of
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.passes.profiling import Tracer
from skyrl_train.megatron.passes.step import forward_logprobs
from skyrl_train.megatron.residency.memory import DeviceMemory
from skyrl_train.ranks import WEIGHTS, Moved, Rendezvous
from skyrl_train.types import TrainBatch


def batch_logprobs(model: Model, packer: Packer, batch: TrainBatch, temperature: float, chunk: int) -> Tensor | None:
    """Logprob of every token of the batch [T] float32 (0 for the first token of a sample); None before the last stage.

    A collective over the ranks that hold the model.
    """
    micro_batches = [packer.pack(batch, samples) for mini_batch in batch.mini_batches for samples in mini_batch]
    results = forward_logprobs(model, micro_batches, temperature, chunk)
    if not results:
        return None
    logprobs = torch.zeros(len(batch.token_ids), dtype=torch.float32)
    for micro_batch, values in zip(micro_batches, results, strict=True):
        logprobs[micro_batch.token_slice] = values
    return logprobs


class MegatronReference:
    """One rank of the reference model."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        model_path: str,
        config: MegatronConfig,
        *,
        bf16: bool,
        seed: int,
        temperature: float,
    ) -> None:
        self.ranks = join(rendezvous, config, seed)
        self._tracer = Tracer(config.torch_profiler_config, "reference", rendezvous.rank)
        self._chunk, self._temperature = config.logprobs_chunk_size, temperature
        self._model = build_model(model_path, config, dtype_of(bf16), trainable=False)
        self._memory = DeviceMemory(self._model.modules)
        self._packer = Packer.of_layout(
            device(),
            sequence_parallel=self._model.bridge.config.sequence_parallel,
        )

    def logprobs(self, batch: TrainBatch) -> Tensor | None:
        """[T] float32 on the reporting rank of the data-parallel shard, None elsewhere. A collective."""
        self._memory.require("logprobs", WEIGHTS)
        with self._tracer("logprobs"):
            logprobs = batch_logprobs(self._model, self._packer, batch, self._temperature, self._chunk)
        self._tracer.step += 1
        return logprobs if self.ranks.reports else None

    def offload(self) -> Moved:
        """Free the weights on the device; only the first time they are copied to the host."""
        return self._memory.offload()

    def reload(self) -> Moved:
        """Take them again; nothing to do if they are there."""
        return self._memory.reload()
