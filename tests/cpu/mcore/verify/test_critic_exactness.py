"""A critic's values, gradient and metrics are those of Hugging Face's model with a linear layer, in every layout."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_train.algorithms.build import build_critic_objective
from skyrl_train.algorithms.reductions import loss_weights
from skyrl_train.megatron.critic import MegatronCritic
from skyrl_train.megatron.verify.hf_reference import comparable, named_gradients
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, _gather_gradients, _gradient, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import Outcome, compare
from skyrl_train.megatron.verify.trial import Trial
from skyrl_train.megatron.weights.export import export
from skyrl_train.ranks import Rendezvous
from skyrl_train.types import TrainBatch
from tests.support.families import make_trial, write_family
from tests.support.layouts import DENSE, EXPERT, FOUR, WHOLE, assert_exact, cases, layout, model

CLIP, HEAD = 0.1, "value_head.weight"


def critic_trial(path: Path, reduction: str = "sequence_mean", lengths: list[int] | None = None) -> Trial:
    """Returns are the trial's advantages; old values differ by up to more than the clip."""
    keys = {"value_clip": CLIP, "value_loss_reduction": reduction, "loss_reduction": "token_mean"}
    return make_trial(path, lengths, objective=build_critic_objective(keys))


def run_critic(trial: Trial, one: Layout) -> Outcome:
    parts = run_on_ranks(_run_rank, (trial, one), one.world_size, timeout_s=120)
    gradients: dict[str, Tensor] = {}
    values: list[Any] = [None] * (len(trial.experience.cu_seqlens) - 1)
    for part in parts:
        assert not gradients.keys() & part["gradients"].keys()
        gradients |= part["gradients"]
        if part["values"] is not None:
            for sample, of_sample in zip(part["sample_ids"].tolist(), part["values"], strict=True):
                values[sample] = of_sample
    metrics = [part["metrics"] for part in parts if part["metrics"]]
    assert all(other == metrics[0] for other in metrics), "all ranks of the last stage report the same"
    return Outcome(gradients, torch.cat(values), metrics[0])


def build_critic(rendezvous: Rendezvous, trial: Trial, one: Layout) -> tuple[MegatronCritic, TrainBatch]:
    critic = MegatronCritic(
        rendezvous,
        trial.model_path,
        one.megatron,
        replace(OPTIMIZER, max_grad_norm=0.0),
        trial.objective,
        bf16=False,
        seed=3,
        num_optimizer_steps=1,
        value_head="value_head",
    )
    return critic, share_of(trial, one, critic.ranks)


def _run_rank(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> dict[str, Any]:
    trial, one = arguments
    critic, batch = build_critic(rendezvous, trial, one)
    values = critic.values(batch)
    bounds = trial.experience.cu_seqlens.tolist()
    nothing = torch.zeros(0)
    tokens = torch.cat([nothing.long(), *(torch.arange(bounds[i], bounds[i + 1]) for i in batch.sample_ids)])
    assert critic._old is not None
    if critic._old.values is not None:
        critic._old = replace(critic._old, values=critic._old.values + trial.old_offsets[tokens])
    report = critic.update(batch, 1, batch.signals["advantages"])
    _gather_gradients(critic.model)
    gradients = {
        name: gradient.clone()
        for name, gradient in export(critic.model, torch.float32, read=_gradient)
        if critic.ranks.owns_stage
    }
    return {
        "gradients": gradients,
        "values": None if values is None else values.split(batch.cu_seqlens.diff().tolist()),
        "sample_ids": batch.sample_ids,
        "metrics": report.metrics,
    }


def hugging_face(trial: Trial) -> Outcome:
    """The loss and its gradient by autograd, written apart from the package's."""
    causal = AutoModelForCausalLM.from_pretrained(trial.model_path, dtype=torch.float32)
    size = causal.config.hidden_size
    head = torch.nn.Parameter(torch.randn(1, size, generator=torch.Generator().manual_seed(3)) / (size + 1))
    experience, (term,) = trial.experience, trial.objective.terms
    weights = loss_weights(
        term.reduction, experience.loss_mask, experience.cu_seqlens, experience.group_ids, trial.max_lengths
    )
    values, total = [], torch.zeros(())
    clipped = torch.zeros(0)
    for start, end in itertools.pairwise(experience.cu_seqlens.tolist()):
        hidden = causal.model(experience.token_ids[None, start:end]).last_hidden_state[0]
        predicted = torch.cat([torch.zeros(1), hidden[:-1] @ head[0]])  # of the state before each token
        values.append(predicted.detach())
        old, target = values[-1] + trial.old_offsets[start:end], trial.advantages[start:end]
        near = old + torch.minimum(torch.maximum(predicted - old, torch.tensor(-CLIP)), torch.tensor(CLIP))
        free, bounded = (predicted - target) ** 2, (near - target) ** 2
        total = total + (0.5 * torch.where(bounded > free, bounded, free) * weights[start:end]).sum()
        mask = experience.loss_mask[start:end]
        clipped = torch.cat([clipped, ((bounded > free) & ((predicted - old).abs() > CLIP))[mask].float()])
    total.backward()
    gradients = {n: g for n, g in named_gradients(causal).items() if n != "lm_head.weight"} | {HEAD: head.grad}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    trained = torch.cat(values)[experience.loss_mask]
    return Outcome(
        gradients,
        torch.cat(values),
        {
            "critic/value_loss": total.item(),
            "critic/final_loss": total.item(),
            "critic/grad_norm": float(norm),
            "critic/loss_metrics/clip_ratio": float(clipped.mean()),
            "critic/loss_metrics/values_mean": float(trained.mean()),
        },
    )


def check(trial: Trial, one: Layout) -> None:
    expected = hugging_face(trial)
    outcome = run_critic(trial, one)
    assert outcome.metrics["critic/num_optimizer_steps"] == 1 and outcome.metrics["critic/critic_lr"] == 0
    assert 0.1 < expected.metrics["critic/loss_metrics/clip_ratio"] < 0.9
    assert_exact(compare(comparable(outcome, expected), expected))


@cases(DENSE | FOUR)
def test_a_tied_model(processes: int, sizes: dict[str, Any]):
    check(critic_trial(model("qwen3_tied")), layout(processes, sizes))


@cases({name: DENSE[name] for name in ("one process", "TP2", "TP2 SP", "PP2")})
def test_a_model_with_a_head_of_its_own(processes: int, sizes: dict[str, Any]):
    check(critic_trial(model("qwen3")), layout(processes, sizes))


@cases({name: EXPERT[name] for name in ("one process", "EP2", "TP2 EP2", "PP2", "CP2")})
def test_a_model_with_experts(processes: int, sizes: dict[str, Any]):
    check(critic_trial(model("qwen3_moe")), layout(processes, sizes))


def test_multi_latent_attention():
    check(critic_trial(model("deepseek_v3")), layout(2, {"tp": 2, "ep": 2, "etp": 1}))


@pytest.mark.parametrize("max_tokens", [16, 40, WHOLE])
def test_any_limit_of_micro_batches(max_tokens: int):
    check(critic_trial(model("qwen3_tied")), layout(2, {"pp": 2}, max_tokens))


@pytest.mark.parametrize("reduction", ["token_mean", "prompt_mean", "dr_grpo"])
def test_any_reduction(reduction: str):
    check(critic_trial(model("qwen3_tied"), reduction), layout(2, {"cp": 2}))


def test_a_rank_without_a_sample_takes_part():
    check(critic_trial(model("qwen3_tied"), lengths=[40]), layout(2, {}))


def with_head(folder: Path, head: Tensor) -> Path:
    """A checkpoint that contains the head of a critic."""
    file = write_family("qwen3_tied", folder) / "model.safetensors"
    save_file(load_file(file) | {HEAD: head}, file, metadata={"format": "pt"})
    return folder


def test_a_head_of_the_checkpoint_is_loaded_and_one_of_another_shape_is_refused(tmp_path: Path):
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    trial = critic_trial(with_head(tmp_path / "one", head))
    values = run_critic(trial, layout(2, {"pp": 2})).logprobs
    causal = AutoModelForCausalLM.from_pretrained(model("qwen3_tied"), dtype=torch.float32)
    first = trial.experience.token_ids[None, : int(trial.experience.cu_seqlens[1])]
    with torch.no_grad():
        expected = causal.model(first).last_hidden_state[0, :-1] @ head[0]
    torch.testing.assert_close(values[1 : len(first[0])], expected, rtol=1e-4, atol=1e-4)
    refused = critic_trial(with_head(tmp_path / "two", torch.zeros(2, 64)))
    with pytest.raises(RuntimeError, match=r"shape \[2, 64\], a critic's head has \[1, 64\]. Name a head"):
        run_critic(refused, layout(1, {}))


def _updates_twice(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> str:
    critic, batch = build_critic(rendezvous, *arguments)
    critic.values(batch)
    critic.update(batch, 1, batch.signals["advantages"])
    try:
        critic.update(batch, 1, batch.signals["advantages"])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_update_without_the_values_of_its_step_is_refused():
    arguments = critic_trial(model("qwen3_tied")), layout(1, {})
    (message,) = run_on_ranks(_updates_twice, arguments, 1, timeout_s=120)
    assert message == (
        "an update of the critic needs its values of step 0 after 1 optimizer steps, which are not kept. Compute them "
        "with values(batch) right before update(batch)"
    )
