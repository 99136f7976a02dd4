"""The critic on one rank: values of states, and updates towards the returns."""

from __future__ import annotations

from torch import Tensor

from skyrl_train.megatron.passes.old_logprobs import OldLogprobs
from skyrl_train.megatron.passes.step import batch_values
from skyrl_train.megatron.trained import TrainedModel
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, UpdateReport
from skyrl_train.types import TrainBatch


class MegatronCritic(TrainedModel):
    """One rank of the critic."""

    _old: OldLogprobs | None = None
    """Values instead of logprobs."""

    def values(self, batch: TrainBatch) -> Tensor | None:
        """Compute the value of the state before every token, and keep them on this rank for the next `update`.

        Returns: [T] float32 on the reporting rank of the shard, None elsewhere.
        """
        self._memory.require("values", WEIGHTS)
        with self._tracer("values"):
            values = batch_values(self.model, self._packer, batch)
        self._old = OldLogprobs(batch.step_id, self.num_steps, values)
        return values if self.ranks.reports else None

    def update(self, batch: TrainBatch, epochs: int, returns: Tensor) -> UpdateReport:
        """Take one optimizer step per mini-batch and epoch. Args: returns [T].

        Raises: RuntimeError if the values of this step and of these weights are not kept.
        """
        self._memory.require("update", WEIGHTS, OPTIMIZER)
        kept, self._old = self._old, None
        if kept is None or (kept.step_id, kept.policy_version) != (batch.step_id, self.num_steps):
            raise RuntimeError(
                f"an update of the critic needs its values of step {batch.step_id} after {self.num_steps} optimizer "
                "steps, which are not kept. Compute them with values(batch) right before update(batch)"
            )
        signals = {"returns": returns} | ({} if kept.values is None else {"old_values": kept.values})
        with self._tracer("update"):
            report = self._train(batch, epochs, self._objective, signals)
        self._tracer.step += 1
        assert report is not None
        return report
