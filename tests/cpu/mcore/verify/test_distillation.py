"""Distillation from a teacher has one gradient, and one set of metrics, in every layout."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from skyrl_train.algorithms.build import build_objective
from skyrl_train.batching.hinted import aligned, with_prompts
from skyrl_train.config import load_config
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.passes.step import batch_topk
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.scorer import MegatronScorer
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import Layout, _token_indices, rules, run_objectives, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import Outcome, compare
from skyrl_train.megatron.verify.trial import Trial
from skyrl_train.megatron.weights.export import export
from skyrl_train.ranks import ParallelRanks, Rendezvous
from skyrl_train.types import TeacherPrompt, TrainBatch
from tests.support.families import VOCABULARY, without_kl
from tests.support.layouts import SMALL, WHOLE, assert_exact, cases, layout, reference
from tests.support.policies import ADAM

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
    objective = build_objective({**values, "distillation_coef": 0.7}, 1.3)
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


def hint_prompts(trial: Trial) -> list[TeacherPrompt]:
    """For each sample a prompt of another length than its own, shorter ones too."""
    masks = torch.split(trial.experience.loss_mask, trial.experience.lengths.tolist())
    generator = torch.Generator().manual_seed(5)
    return [
        TeacherPrompt(
            length=int((~mask).long().cumprod(0).sum()),
            token_ids=torch.randint(0, VOCABULARY, (3 + 11 * (index % 4),), generator=generator),
        )
        for index, mask in enumerate(masks)
    ]


def hinted_share(trial: Trial, one: Layout, ranks: ParallelRanks) -> TrainBatch:
    shards = [share_of(trial, one, replace(ranks, dp_rank=rank)) for rank in range(ranks.dp_size)]
    return with_prompts(shards, hint_prompts(trial), rules(one, ranks.dp_size))[ranks.dp_rank]


def _topk(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> dict[str, Any] | None:
    """Returns: the tokens of this shard, and the fields without and with a hint."""
    trial, one, num_candidates = arguments
    ranks = join(rendezvous, one.megatron, seed=1)
    batch, hinted = share_of(trial, one, ranks), hinted_share(trial, one, ranks)
    model = build_model(trial.model_path, one.megatron, torch.float32, trainable=False)
    packer = Packer.of_layout(sequence_parallel=model.bridge.config.sequence_parallel)
    found = [batch_topk(model, packer, each, 1.3, K, num_candidates) for each in (batch, hinted)]
    if not ranks.reports:
        return None
    plain, with_hint = (aligned(fields, each) for fields, each in zip(found, (batch, hinted), strict=True))
    return {"tokens": _token_indices(trial.experience, batch.sample_ids), "plain": plain, "hinted": with_hint}


def teachers_view(trial: Trial, num_candidates: int, prompts: list[TeacherPrompt] | None = None) -> dict[str, Tensor]:
    """Hugging Face's logprobs of every token and of the K likeliest; after other prompts, of the responses alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trial.model_path, dtype=torch.float32)
    experience = trial.experience
    samples = torch.split(experience.token_ids, experience.lengths.tolist())
    chosen = prompts or [TeacherPrompt(1, tokens[:1]) for tokens in samples]
    fields: dict[str, list[Tensor]] = {"teacher_logprobs": [], "teacher_topk_ids": [], "teacher_topk_logprobs": []}
    for tokens, prompt in zip(samples, chosen, strict=True):
        response = tokens[prompt.length :]
        with torch.no_grad():
            logits = model(torch.cat([prompt.token_ids, response])[None]).logits[0, len(prompt.token_ids) - 1 : -1]
        logprobs = (logits / 1.3).log_softmax(-1)
        best, ids = logprobs[:, :num_candidates].topk(K)
        values = (logprobs.gather(1, response[:, None])[:, 0], ids.int(), best)
        for parts, value in zip(fields.values(), values, strict=True):
            parts += [value.new_zeros(prompt.length, *value.shape[1:]), value]
    return {name: torch.cat(parts) for name, parts in fields.items()}


@pytest.mark.parametrize("num_candidates", [VOCABULARY, 67, 40])
@cases({"one process": (1, {}), **LAYOUTS})
def test_the_teachers_likeliest_tokens_are_those_of_hugging_face_with_and_without_a_hint(
    processes: int, sizes: dict[str, Any], num_candidates: int
):
    """With 40 candidates the second of two tensor-parallel ranks has none, with 67 it has two."""
    trial = reference("qwen3_tied")[0]
    parts = run_on_ranks(_topk, (trial, layout(processes, sizes), num_candidates), processes, timeout_s=120)
    for kind, prompts in (("plain", None), ("hinted", hint_prompts(trial))):
        expected = teachers_view(trial, num_candidates, prompts)
        found = {name: torch.zeros_like(values) for name, values in expected.items()}
        for part in filter(None, parts):
            for name in expected:
                found[name][part["tokens"]] = part[kind][name]
        assert torch.equal(found["teacher_topk_ids"], expected["teacher_topk_ids"])
        for name in ("teacher_logprobs", "teacher_topk_logprobs"):
            torch.testing.assert_close(found[name], expected[name], rtol=2e-5, atol=2e-5)


def _scored(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> dict[str, Tensor]:
    trial, one, topk = arguments
    path = trial.model_path
    scorer = MegatronScorer(
        rendezvous,
        path,
        one.megatron,
        bf16=False,
        seed=1,
        temperature=1.3,
        name="teacher",
        topk=topk,
        policy_vocab_size=AutoConfig.from_pretrained(path).vocab_size,
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


def _own_teacher(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> list[dict[str, Tensor]]:
    """Fields of the policy as its own teacher, before and after an update."""
    trial, one, topk = arguments
    path, objective = trial.model_path, without_kl(trial.objective)
    policy = MegatronPolicy(rendezvous, path, one.megatron, ADAM, objective, bf16=False, seed=1, num_optimizer_steps=2)
    batch = share_of(trial, one, policy.ranks)
    hinted, found = hinted_share(trial, one, policy.ranks), []
    for _ in range(2):
        fields = policy.teacher_logprobs(hinted, topk, is_base=False)
        assert fields is not None
        found.append({"tokens": _token_indices(trial.experience, batch.sample_ids), **fields})
        policy.update(batch)
        found.append({name: tensor.clone() for name, tensor in export(policy.model, torch.float32)})
    return found


def test_the_policy_teaches_itself_with_its_current_weights(tmp_path: Path):
    trial = reference("qwen3_tied")[0]
    trial = replace(trial, objective=replace(trial.objective, temperature=1.3))
    ((first, updated, second, _),) = run_on_ranks(_own_teacher, (trial, layout(1, {}), K), 1, timeout_s=120)
    shutil.copytree(trial.model_path, tmp_path / "updated")
    save_file(updated, tmp_path / "updated/model.safetensors")
    for fields, path in ((first, trial.model_path), (second, str(tmp_path / "updated"))):
        expected = teachers_view(replace(trial, model_path=path), VOCABULARY, hint_prompts(trial))
        for name, values in expected.items():
            torch.testing.assert_close(fields[name], values[fields["tokens"]], rtol=2e-5, atol=2e-5)
    assert (first["teacher_logprobs"] - second["teacher_logprobs"]).abs().max() > 1e-2
