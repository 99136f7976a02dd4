"""The policy on one rank: logprobs, updates, and the export of its weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.objective import Objective, objective_loss
from skyrl_train.batching.hinted import aligned
from skyrl_train.megatron.passes.old_logprobs import LogprobCheck, OldLogprobs, old_logprobs
from skyrl_train.megatron.passes.step import batch_logprobs, batch_logprobs_and_entropy, batch_topk
from skyrl_train.megatron.trained import TrainedModel
from skyrl_train.megatron.weights.all_stages import specs_by_stage, to_every_stage
from skyrl_train.megatron.weights.export import adapter_specs, export, export_specs, merged
from skyrl_train.megatron.weights.proof import LiveSums, checked_adapters, warm_up
from skyrl_train.megatron.weights.save import save_model
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, LogprobLimit, UpdateReport
from skyrl_train.types import TrainBatch
from skyrl_train.weight_sync.bucket import TensorSpec


class MegatronPolicy(TrainedModel):
    """One rank of the policy: logprobs, updates on samples, and the export of its weights."""

    _old: OldLogprobs | None = None

    def prompt_logprobs(self, batch: TrainBatch) -> Tensor | None:
        """[T] float32 under the current weights, on the reporting rank of the shard; None elsewhere.

        Always at temperature 1, like the engines' prompt logprobs.
        """
        self._memory.require("prompt_logprobs", WEIGHTS)
        logprobs = batch_logprobs(self.model, self._packer, batch, 1.0)
        return logprobs if self.ranks.reports else None

    def reference_logprobs(self, batch: TrainBatch) -> Tensor | None:
        """[T] float32 of the model without its adapters, on the reporting rank of the shard; None elsewhere."""
        self._memory.require("reference_logprobs", WEIGHTS)
        assert self.model.lora is not None
        with self.model.lora.off():
            logprobs = self._logprobs(batch)
        return logprobs if self.ranks.reports else None

    def teacher_logprobs(self, batch: TrainBatch, topk: int, is_base: bool) -> dict[str, Tensor] | None:
        """Fields of the policy as its own teacher, like `MegatronScorer.teacher_logprobs`.

        Args: is_base: with the adapters off; otherwise with the current weights.
        """
        self._memory.require("teacher_logprobs", WEIGHTS)
        objective, size = self._objective, self.model.vocab_size
        lora = self.model.lora
        adapters = contextlib.nullcontext() if lora is None or not is_base else lora.off()
        with self._tracer("teacher_logprobs"), adapters:
            fields = batch_topk(self.model, self._packer, batch, objective.temperature, topk, size)
        return aligned(fields, batch) if self.ranks.reports else None

    def _logprobs(self, batch: TrainBatch) -> Tensor | None:
        """[T] float32 at the objective's temperature; None before the last pipeline stage."""
        return batch_logprobs(self.model, self._packer, batch, self._objective.temperature)

    def keep_old_logprobs(self, batch: TrainBatch, ref_logprobs: Tensor | None = None) -> dict[str, Tensor] | None:
        """Compute the old logprobs of the next `update` and keep them on this rank.

        Returns: name -> [T] float32 on the reporting rank, None elsewhere: `old_logprobs` and `old_entropy` if a
        selection of tokens reads them; with ref_logprobs [T] `kl`, the estimated KL divergence for the reward.
        """
        self._memory.require("keep_old_logprobs", WEIGHTS)
        objective, needs = self._objective, self._objective.selection_needs
        with self._tracer("old_logprobs"):
            logprobs, entropy = batch_logprobs_and_entropy(
                self.model, self._packer, batch, objective.temperature, with_entropy="old_entropy" in needs
            )
        self._old = OldLogprobs(batch.step_id, self.num_steps, logprobs)
        if logprobs is None or not self.ranks.reports:
            return None
        found = {"old_logprobs": logprobs, "old_entropy": entropy}
        if ref_logprobs is not None:
            found["kl"] = objective.kl_estimator(logprobs, ref_logprobs)
        return {name: values for name, values in found.items() if values is not None and name in (*needs, "kl")}

    def evaluate(self, batch: TrainBatch) -> float | None:
        """Sum of the objective over the tokens of this shard, without gradients; None except on its reporting rank.

        The current logprobs are the old logprobs.
        """
        self._memory.require("evaluate", WEIGHTS)
        logprobs = self._logprobs(batch)
        if logprobs is None or not self.ranks.reports:
            return None
        sample = torch.repeat_interleave(batch.cu_seqlens.diff().long())
        per_sample = PerSample(sample, len(batch.sample_ids), batch.loss_mask)
        signals = {**batch.signals, "old_logprobs": logprobs}
        tokens = TokenInputs(logprobs.double(), batch.loss_mask, per_sample, signals)
        weights = {name: values.double() for name, values in batch.loss_weights.items()}
        return float(objective_loss(self._objective, tokens, weights)[0])

    def update(
        self,
        batch: TrainBatch,
        epochs: int = 1,
        objective: Objective | None = None,
        limit: LogprobLimit | None = None,
        **signals: Tensor | Mapping[str, Tensor],
    ) -> UpdateReport:
        """Take one optimizer step per mini-batch and epoch, on the given objective or by default the policy's.

        The old logprobs of a single step come from its own forward pass, as do all with `prox_logp_method` loglinear;
        otherwise `keep_old_logprobs` must have computed them. An update that the limit refuses changes nothing.

        Args: signals: [T] each, by their names in TokenInputs: advantages, and ref_logprobs if a term reads them; or a
            teacher's, by these names: those of several teachers are added, each 0 where another one scores.
        Raises: RuntimeError if old logprobs are missing, or belong to another step or other weights.
        """
        self._memory.require("update", WEIGHTS, OPTIMIZER)
        check = LogprobCheck(limit, batch, self.ranks)
        with self._tracer("update"):
            report = self._update(batch, epochs, objective or self._objective, check, _by_field(signals))
        self._tracer.step += 1
        return report

    def _update(
        self, batch: TrainBatch, epochs: int, objective: Objective, check: LogprobCheck, signals: dict[str, Tensor]
    ) -> UpdateReport:
        kept, self._old = self._old, None
        num_steps, method = epochs * len(batch.mini_batches), objective.prox_logp_method
        old = old_logprobs(kept, batch, self.num_steps, num_steps, method)
        if check.refuses_kept(old):
            return _refused(check)
        if old is not None:
            signals["old_logprobs"] = old
        if check.tokens is not None:
            signals["is_compared"] = check.tokens
        report = self._train(batch, epochs, objective, signals, check.refuses_pass)
        return _refused(check) if report is None else replace(report, logprob_difference=check.difference)

    def export(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that engines receive from this pipeline stage; all its ranks must drain it.

        Weights (weights/export.py) with adapters folded in, or the adapters alone if `lora.sync` is "adapter".

        Raises: WeightSyncError at its end if they are not the current weights (weights/proof.py).
        """
        self._memory.require("export", WEIGHTS)
        lora = self.model.lora
        if lora is not None and lora.is_sent_alone:
            return checked_adapters(lora, dtype)
        sums = self._live_sums()
        # Merged once more for the check, which would otherwise compare what is exported with itself.
        return sums.checked(export(self.model, dtype, merged(lora), sums.tasks), dtype, merged(lora))

    @functools.cache  # noqa: B019  as below
    def _live_sums(self) -> LiveSums:
        return LiveSums(self.model)

    def prepare_export(self, dtype: torch.dtype) -> None:
        """Do what is done once for all exports. A collective over the stage."""
        self.export_specs(dtype)
        if self.model.lora is None or not self.model.lora.is_sent_alone:
            self._live_sums()
        warm_up()

    @functools.cache  # noqa: B019  one policy lives as long as its process; its topology never changes
    def export_specs(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Specs of what `export` yields on this rank, in order, without materialising a weight."""
        lora = self.model.lora
        if lora is not None and lora.is_sent_alone:
            return adapter_specs(lora, dtype)
        return export_specs(self.model, dtype)

    @functools.cache  # noqa: B019  as above
    def _all_specs(self, dtype: torch.dtype) -> list[list[TensorSpec]]:
        return specs_by_stage(self.export_specs(dtype))

    def specs_of_every_stage(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Specs of what `export_to_every_stage` yields, in order. The first call is a collective over all ranks."""
        return [spec for stage in self._all_specs(dtype) for spec in stage]

    def export_to_every_stage(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Tensors of all stages on every rank (weights/all_stages.py); all ranks must drain them."""
        return to_every_stage(self._all_specs(dtype), self.export(dtype))

    def save_hf(self, folder: str) -> None:
        """Write the weights as a Hugging Face checkpoint; with adapters folded in, and these in `folder/adapter`.

        The folder gets its name when it is complete and verified. Raises: ValueError if it cannot be written.
        """
        self._memory.require("save_hf", WEIGHTS)
        save_model(self.model, self._model_path, folder)


def _by_field(signals: Mapping[str, Tensor | Mapping[str, Tensor]]) -> dict[str, Tensor]:
    fields: dict[str, Tensor] = {}
    for name, value in signals.items():
        for field, tensor in value.items() if isinstance(value, Mapping) else ((name, value),):
            fields[field] = fields[field] + tensor if field in fields else tensor
    return fields


def _refused(check: LogprobCheck) -> UpdateReport:
    return UpdateReport({}, logprob_difference=check.difference, is_refused=True)
