"""Hugging Face's own model on a mini-batch: the reference for all layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.metrics import Reduce, Total, partial_sums
from skyrl_train.algorithms.objective import Objective, objective_loss
from skyrl_train.algorithms.reductions import loss_weights
from skyrl_train.batching.select import selections_of
from skyrl_train.device import device
from skyrl_train.hf.hub import local_folder
from skyrl_train.megatron.model.families import Dequantised
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import Outcome
from skyrl_train.megatron.verify.trial import Trial
from skyrl_train.ranks import Rendezvous

OF_EXPERTS = {"experts_implementation": "eager"}
"""A product per expert: torch's grouped one, the default, refuses rows that are not a multiple of 16 bytes."""


def run_hugging_face(trial: Trial, *, timeout_s: float = 120.0) -> Outcome:
    """Run `hugging_face` in a separate process, which frees its memory.
    Raises: RuntimeError with the traceback if it failed.
    """
    (outcome,) = run_on_ranks(_in_process, trial, 1, timeout_s=timeout_s)
    return outcome


def _in_process(rendezvous: Rendezvous, trial: Trial) -> Outcome:
    return hugging_face(trial, model=load(trial).to(device()), model_device=device())


def load(trial: Trial) -> Any:
    """Hugging Face's model in the trial's dtype. FP8 weights are read as for Megatron: transformers trains none, has no
    names for gradients of those that it dequantises, and refuses shapes that blocks do not divide.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # its model classes take seconds

    dtype = torch.bfloat16 if trial.bf16 else torch.float32
    folder = local_folder(trial.model_path)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **OF_EXPERTS)
    reader = Dequantised.of(config, folder, dtype)
    names = [name for name in reader.load_hf_weight_names() if not name.endswith("_scale_inv")]
    weights = reader.load_some_hf_weight(names)
    del config.quantization_config
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    return kind.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, trust_remote_code=False, **OF_EXPERTS
    )


def hugging_face(
    trial: Trial,
    *,
    every_metric: bool = False,
    model: Any = None,
    aux_loss: Callable[[], Tensor] | None = None,
    gradients_of: Callable[[Any], dict[str, Tensor]] | None = None,
    model_device: torch.device | None = None,
) -> Outcome:
    """Loss and gradient by autograd through log_softmax, in the trial's dtype; the metrics that follow from them.

    Args: model, gradients_of: another model than the trial's, such as PEFT's, and its gradients by name; aux_loss: the
        load-balancing loss of its routers after the forward passes; model_device: the CPU by default; every_metric:
        also those of losses and corrections, which round at their bounds.
    """
    model = model or load(trial)
    experience, objective = trial.experience, trial.objective
    weights = {
        reduction: loss_weights(
            reduction, experience.loss_mask, experience.cu_seqlens, experience.group_ids, trial.max_lengths
        )
        for reduction in objective.reductions
    }
    losses: dict[str, list[Tensor]] = {term.name: [] for term in objective.terms}
    totals: dict[str, Total] = {}
    passes = _forward(trial, model, model_device)
    fixed = torch.cat(passes.logprobs).detach()
    fixed_signals = _fixed_signals(trial, passes, fixed)
    for index, (start, end) in enumerate(itertools.pairwise(experience.cu_seqlens.tolist())):
        logprobs, mask = passes.logprobs[index], experience.loss_mask[start:end]
        signals = {name: values[start:end] for name, values in fixed_signals.items()}
        signals |= {name: values[index] for name, values in passes.signals.items()}
        if objective.approximates:
            signals["old_logprobs"] = objective.old_logprobs(logprobs.detach(), signals)
        per_sample = PerSample(torch.zeros(end - start, dtype=torch.int64), 1, mask)
        given = TokenInputs(logprobs, mask, per_sample, signals)
        if every_metric:
            _add(totals, objective, given, {name: values[start:end] for name, values in weights.items()})
        inputs = objective.shaped(given)
        factors = [correction(inputs).factor for correction in objective.corrections]
        for term in objective.terms:
            terms = term.loss(inputs).terms
            if term is objective.terms[0] or term.is_corrected:
                terms = math.prod(factors, start=terms)
            losses[term.name].append((terms * weights[term.reduction][start:end]).sum())
    sums = {name: torch.stack(parts).sum() for name, parts in losses.items()}
    balance = loss = torch.zeros(()) if aux_loss is None else aux_loss()
    for term in objective.terms:
        loss = loss + term.coef * sums[term.name]
    loss.backward()
    gradients = (gradients_of or named_gradients)(model)
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    metrics = {name: total.value for name, total in totals.items()}
    metrics |= {f"policy/{name}_loss": value.item() for name, value in sums.items()}
    metrics |= {"policy/final_loss": loss.item(), "policy/grad_norm": float(norm)}
    if aux_loss is not None:
        metrics["policy/moe_aux_loss"] = balance.item()
    return Outcome(gradients, fixed, metrics)


@dataclass(frozen=True, slots=True)
class _Passes:
    """Values of each sample [tokens], with their gradients."""

    logprobs: list[Tensor]
    entropies: list[Tensor]
    likeliest: list[Tensor]
    """Logprobs of the teacher's likeliest tokens, empty without them."""

    @property
    def signals(self) -> dict[str, list[Tensor]]:
        return {"entropy": self.entropies} | ({"topk_logprobs": self.likeliest} if self.likeliest else {})


def _forward(trial: Trial, model: Any, model_device: torch.device | None) -> _Passes:
    passes = _Passes([], [], [])
    for start, end in itertools.pairwise(trial.experience.cu_seqlens.tolist()):
        tokens = trial.experience.token_ids[start:end].to(model_device)
        logits = model(tokens[None]).logits[0].float() / trial.objective.temperature
        distribution = logits.log_softmax(-1)[:-1]
        sampled = distribution.gather(1, tokens[1:, None])[:, 0].cpu()
        passes.logprobs.append(torch.cat([torch.zeros(1), sampled]))
        if trial.teacher_topk is not None:
            ids = trial.teacher_topk[0][start:end].long()
            passes.likeliest.append(torch.cat([torch.zeros(1, ids.shape[1]), distribution.cpu().gather(1, ids[1:])]))
        passes.entropies.append(torch.cat([torch.zeros(1), -(distribution.exp() * distribution).sum(-1).cpu()]))
    return passes


def _fixed_signals(trial: Trial, passes: _Passes, logprobs: Tensor) -> dict[str, Tensor]:
    """[T] each, without gradients."""
    signals = {
        **trial.experience.signals,
        "old_logprobs": logprobs + trial.old_offsets,
        "ref_logprobs": logprobs + trial.ref_offsets,
        "teacher_logprobs": logprobs + trial.ref_offsets,
        "advantages": trial.advantages,
    }
    old = {"old_logprobs": signals["old_logprobs"], "old_entropy": torch.cat(passes.entropies).detach()}
    return signals | selections_of(trial.objective, trial.experience, trial.advantages, old) | trial.teacher_signals


def _add(totals: dict[str, Total], objective: Objective, inputs: TokenInputs, weights: dict[str, Tensor]) -> None:
    """Add the metrics of one sample."""
    with torch.no_grad():
        _, metrics = objective_loss(objective, inputs, weights)
    num_tokens = inputs.loss_mask.sum().expand_as(inputs.loss_mask)
    for name, metric in metrics.items():
        if metric.reduce is not Reduce.STEP_MEAN:
            part = Total(metric.reduce, tuple(partial_sums(metric, inputs.loss_mask, num_tokens).tolist()))
            totals[name] = totals[name] + part if name in totals else part


def comparable(outcome: Outcome, reference: Outcome) -> Outcome:
    """The outcome without gradients of buffers (the routers' bias) and metrics that Hugging Face lacks."""
    gradients = {name: g for name, g in outcome.gradients.items() if not name.endswith("e_score_correction_bias")}
    return Outcome(gradients, outcome.logprobs, {name: outcome.metrics[name] for name in reference.metrics})


def named_gradients(model: Any) -> dict[str, Tensor]:
    """Float32 gradients on the CPU under the checkpoint's names. transformers fuses experts in memory and splits them
    when it saves.
    """
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return revert_weight_conversion(model, {name: gradient.float().cpu() for name, gradient in gradients.items()})
