"""A frozen model, such as the reference of the KL term, on one rank."""

from __future__ import annotations

from torch import Tensor

from skyrl_train.batching.hinted import aligned
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.megatron.model.model import build_model, dtype_of
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.passes.profiling import Tracer
from skyrl_train.megatron.passes.step import batch_logprobs, batch_topk
from skyrl_train.megatron.residency.memory import DeviceMemory
from skyrl_train.ranks import WEIGHTS, Moved, Rendezvous
from skyrl_train.types import TrainBatch


class MegatronScorer:
    """One rank of a frozen model that scores samples."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        model_path: str,
        config: MegatronConfig,
        *,
        bf16: bool,
        seed: int,
        temperature: float,
        name: str = "reference",
        topk: int = 0,
        policy_vocab_size: int | None = None,
    ) -> None:
        """Args: name: of its traces; topk: number of likeliest tokens of a teacher; policy_vocab_size: tokens of
        the model that learns from these, which must have them in its vocabulary.
        """
        self.ranks = join(rendezvous, config, seed)
        self._tracer = Tracer(config.torch_profiler_config, name, rendezvous.rank)
        self._temperature = temperature
        self._model = build_model(model_path, config, dtype_of(bf16), trainable=False)
        self._topk, self._num_candidates = topk, self._model.vocab_size
        if policy_vocab_size is not None:
            self._num_candidates = min(self._num_candidates, policy_vocab_size)
        self._memory = DeviceMemory(self._model.modules)
        self._packer = Packer.of_layout(sequence_parallel=self._model.bridge.config.sequence_parallel)

    def logprobs(self, batch: TrainBatch) -> Tensor | None:
        """[T] float32 on the reporting rank of the data-parallel shard, None elsewhere. A collective."""
        self._memory.require("logprobs", WEIGHTS)
        with self._tracer("logprobs"):
            logprobs = batch_logprobs(self._model, self._packer, batch, self._temperature)
        self._tracer.step += 1
        return logprobs if self.ranks.reports else None

    def teacher_logprobs(self, batch: TrainBatch) -> dict[str, Tensor] | None:
        """Fields of a teacher, on the reporting rank of the data-parallel shard. A collective.

        Returns: teacher_logprobs [T] float32 and, with `topk`, teacher_topk_ids [T, k] int32 and
        teacher_topk_logprobs [T, k] float32 of the likeliest tokens; all are 0 where the batch's micro-batches have no
        sample. T are the tokens of the policy's batch, also for a `HintedBatch`, whose prompts are 0.
        """
        self._memory.require("teacher_logprobs", WEIGHTS)
        with self._tracer("teacher_logprobs"):
            temperature, k = self._temperature, self._topk
            fields = batch_topk(self._model, self._packer, batch, temperature, k, self._num_candidates)
        self._tracer.step += 1
        return aligned(fields, batch) if self.ranks.reports else None

    def offload(self) -> Moved:
        """Free the weights on the device; they are copied to the host the first time only."""
        return self._memory.offload()

    def reload(self) -> Moved:
        """Restore the weights if they are offloaded."""
        return self._memory.reload()
