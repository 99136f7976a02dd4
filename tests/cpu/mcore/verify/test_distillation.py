"""Distillation from a teacher has one gradient, and one set of metrics, in every layout."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.build import build_objective
from skyrl_train.config import load_config
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.passes.step import batch_topk
from skyrl_train.megatron.scorer import MegatronScorer
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import Layout, _token_indices, run_objectives, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import Outcome, compare
from skyrl_train.megatron.verify.trial import Trial
from skyrl_train.ranks import Rendezvous
from tests.support.families import VOCABULARY
from tests.support.layouts import SMALL, WHOLE, assert_exact, cases, layout, reference

LAYOUTS = {"TP2 SP": (2, {"tp": 2}), "PP2": (2, {"pp": 2}), "DP2": (2, {}), "CP2": (2, {"cp": 2})}
TYPES = ("advantage", "loss", "topk_forward", "topk_reverse")
K = 5


def trial_of(kind: str) -> Trial:
    trial = reference("qwen3_tied")[0]
    values = load_config([f"trainer.algorithm.distillation.distillation_type={kind}"]).trainer.algorithm.values
    generator = torch.Generator().manual_seed(3)
    total = len(trial.experience.token_ids)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:K] for _ in range(total)]).int()
    logprobs = torch.randn(total, VOCABULARY, generator=generator).log_softmax(-1)[:, :K]
    objective = build_objective({**values, "distillation_coef": 0.7}, 1.3, 7)
    return replace(trial, objective=objective, teacher_topk=(ids, logprobs))


@functools.cache
def outcomes(processes: int, max_tokens: int, **sizes: int) -> dict[str, Outcome]:
    """Form -> outcome, all of one start of the processes."""
    trial = trial_of(TYPES[0])
    objectives = [trial_of(kind).objective for kind in TYPES]
    found = run_objectives(trial, layout(processes, sizes, max_tokens), objectives)
    return dict(zip(TYPES, found, strict=True))


@functools.cache
def hugging_faces(kind: str) -> Outcome:
    return hugging_face(trial_of(kind))


@pytest.mark.parametrize("kind", TYPES)
@cases(LAYOUTS)
def test_every_form_has_hugging_faces_gradient_and_the_metrics_of_one_process(
    kind: str, processes: int, sizes: dict[str, Any]
):
    trial, hf, single = trial_of(kind), hugging_faces(kind), outcomes(1, WHOLE)[kind]
    assert single.metrics["policy/teacher_kl"] == pytest.approx(
        float((trial.old_offsets - trial.ref_offsets)[trial.experience.loss_mask].mean()), abs=1e-5
    )
    outcome = outcomes(processes, SMALL, **sizes)[kind]
    assert_exact(compare(comparable(outcome, hf), hf))
    assert_exact(compare(outcome, single))


@pytest.mark.parametrize("max_tokens", [16, 100])
def test_the_gradient_is_unchanged_by_the_token_limit(max_tokens: int):
    for kind, outcome in outcomes(1, max_tokens).items():
        assert_exact(compare(comparable(outcome, hugging_faces(kind)), hugging_faces(kind)))


def _topk(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> dict[str, Any] | None:
    trial, one, num_candidates = arguments
    ranks = join(rendezvous, one.megatron, seed=1)
    batch = share_of(trial, one, ranks)
    model = build_model(trial.model_path, one.megatron, torch.float32, trainable=False)
    packer = Packer.of_layout(sequence_parallel=model.bridge.config.sequence_parallel)
    fields = batch_topk(model, packer, batch, 1.3, 7, K, num_candidates)
    if fields is None or not ranks.reports:
        return None
    return {"tokens": _token_indices(trial.experience, batch.sample_ids), **fields}


def teachers_view(trial: Trial, num_candidates: int) -> dict[str, Tensor]:
    """Hugging Face's logprobs of every token and of the K likeliest."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trial.model_path, dtype=torch.float32)
    experience, parts = trial.experience, []
    for tokens in torch.split(experience.token_ids, experience.lengths.tolist()):
        with torch.no_grad():
            logprobs = (model(tokens[None]).logits[0] / 1.3).log_softmax(-1)[:-1]
        best, ids = logprobs[:, :num_candidates].topk(K)
        parts.append((logprobs.gather(1, tokens[1:, None])[:, 0], ids.int(), best))
    names = ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")
    first = [torch.cat([value.new_zeros(1, *value.shape[1:]), value]) for part in parts for value in part]
    return {name: torch.cat(first[index::3]) for index, name in enumerate(names)}


@pytest.mark.parametrize("num_candidates", [VOCABULARY, 67, 40])
@cases({"one process": (1, {}), **LAYOUTS})
def test_the_teachers_likeliest_tokens_are_those_of_hugging_face(
    processes: int, sizes: dict[str, Any], num_candidates: int
):
    """With 40 candidates the second of two tensor-parallel ranks has none, with 67 it has two."""
    trial = reference("qwen3_tied")[0]
    expected = teachers_view(trial, num_candidates)
    parts = run_on_ranks(_topk, (trial, layout(processes, sizes), num_candidates), processes, timeout_s=120)
    found = {name: torch.zeros_like(values) for name, values in expected.items()}
    for part in filter(None, parts):
        for name in expected:
            found[name][part["tokens"]] = part[name]
    assert torch.equal(found["teacher_topk_ids"], expected["teacher_topk_ids"])
    for name in ("teacher_logprobs", "teacher_topk_logprobs"):
        torch.testing.assert_close(found[name], expected[name], rtol=2e-5, atol=2e-5)


def _scored(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> dict[str, Tensor]:
    trial, one, topk = arguments
    path = trial.model_path
    scorer = MegatronScorer(
        rendezvous, path, one.megatron, bf16=False, seed=1, temperature=1.3, name="teacher", topk=topk, policy_path=path
    )
    batch = share_of(trial, one, scorer.ranks)
    first = tuple(tuple(samples[:1] for samples in mini_batch) for mini_batch in batch.mini_batches)
    fields = scorer.teacher_logprobs(replace(batch, mini_batches=first))
    assert fields is not None
    chosen = torch.zeros(len(batch.token_ids), dtype=torch.bool)
    for samples in (sample for mini_batch in first for sample in mini_batch):
        for sample in samples:
            chosen[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1]] = True
    return {"tokens": _token_indices(trial.experience, batch.sample_ids), "chosen": chosen, **fields}


@pytest.mark.parametrize("topk", [0, K])
def test_a_teacher_scores_the_samples_of_its_micro_batches_alone(topk: int):
    trial = reference("qwen3_tied")[0]
    expected = teachers_view(trial, VOCABULARY)
    (part,) = run_on_ranks(_scored, (trial, layout(1, {}), topk), 1, timeout_s=120)
    tokens, chosen = part.pop("tokens"), part.pop("chosen")
    assert chosen.any() and not chosen.all()
    assert part.keys() == ({"teacher_logprobs"} if topk == 0 else expected.keys())
    for name, values in part.items():
        assert not values[~chosen].any()
        torch.testing.assert_close(values[chosen], expected[name][tokens][chosen], rtol=2e-5, atol=2e-5)
