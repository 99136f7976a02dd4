"""The gradient of a mini-batch, and everything logged about it, does not depend on how it was split.

Every layout runs real Megatron-core in as many processes over gloo and is compared with Hugging Face's own model in one
process, and its metrics with those of one Megatron process with one micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.staleness import Buckets
from skyrl_train.algorithms.tables import CORRECTIONS, LOSSES, REDUCTIONS
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face, load
from skyrl_train.megatron.verify.layout_check import run_layout, run_objectives
from skyrl_train.megatron.verify.outcome import FLOAT32, Outcome, compare
from skyrl_train.megatron.verify.trial import Trial
from tests.support.families import COMBINED, FAMILIES, MOE, lengths, make_trial, write_family
from tests.support.layouts import (
    DENSE,
    EXPERT,
    EXPERT_FOUR,
    FOUR,
    WHOLE,
    Sizes,
    assert_exact,
    check,
    layout,
    model,
    reference,
)
from tests.support.own_functions import geometric

QUICK = {
    "qwen3_tied": {*DENSE},
    "qwen3": {"TP2 PP2", "DP2 PP2", "TP2 DP2", "CP2 TP2", "PP3"},
    "qwen3_moe": {*EXPERT, "EP2 PP2", "EP2 ETP2"},
}
"""Family -> layouts that are also tested where the slow tests are left out."""


FOR_COMBINED = ("one process", "DP2", "PP2 VPP2", "TP2 ETP1", "TP2 EP2")
"""Layouts that shard no part of a model (checks/test_model_check.py has each family in one process), or as others do,
or in two dimensions."""


def families(names: list[str], table: Sizes, combined: Sizes) -> Any:
    """Each with the layouts of the table that shard it in one dimension, and those of COMBINED with the others too."""
    each = []
    for one, sizes in (table | combined).items():
        is_for_all = one in table and one not in FOR_COMBINED
        for name in names if is_for_all else [name for name in names if name in COMBINED]:
            marks = () if one in QUICK.get(name, ()) else pytest.mark.slow
            each.append(pytest.param(name, *sizes, marks=marks, id=f"{one}-{name}"))
    return pytest.mark.parametrize(("name", "processes", "sizes"), each)


PARTIAL_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}


@pytest.mark.parametrize(
    ("name", "changes", "processes", "sizes"),
    [
        ("qwen3_tied", {"pad_token_id": 3}, 2, {"tp": 2, "sp": False}),
        ("qwen3_tied", {"pad_token_id": 3}, 2, {"pp": 2}),
        ("qwen3_tied", {"pad_token_id": 3}, 4, {"cp": 2, "tp": 2}),
        ("qwen3", {"pad_token_id": 3}, 2, {"tp": 2}),
        ("glm4_moe", PARTIAL_ROTARY, 4, {"cp": 2, "ep": 2}),
        ("glm4_moe", PARTIAL_ROTARY, 2, {"tp": 2}),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, 2, {"ep": 2}),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, 2, {"tp": 2, "etp": 1}),
        # Rows of experts that are no multiple of 16 bytes, and so without grouped products.
        ("qwen3_moe", {"moe_intermediate_size": 6}, 2, {"tp": 2, "etp": 2}),
        ("qwen3_moe", {"moe_intermediate_size": 6}, 2, {"ep": 2}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_variants_of_a_family_have_hugging_faces_gradient(
    name: str, changes: dict[str, Any], processes: int, sizes: dict[str, Any], tmp_path: Path
):
    trial = make_trial(write_family(name, tmp_path, **changes))
    trial.experience.token_ids[::9] = 3  # the padding token, where there is one
    hf = hugging_face(trial)
    assert_exact(compare(comparable(run_layout(trial, layout(processes, sizes)), hf), hf))


@families([name for name in FAMILIES if name not in MOE], DENSE, FOUR)
def test_every_dense_family_has_hugging_faces_gradient(name: str, processes: int, sizes: dict[str, Any]):
    check(name, layout(processes, sizes))


@families(MOE, EXPERT, EXPERT_FOUR)
def test_every_family_of_experts_has_hugging_faces_gradient(name: str, processes: int, sizes: dict[str, Any]):
    check(name, layout(processes, sizes))


@pytest.mark.parametrize("max_tokens", [16, 40, 100, WHOLE])
def test_gradient_is_unchanged_by_the_token_limit(max_tokens: int):
    check("qwen3_tied", layout(2, {"pp": 2}, max_tokens))


@pytest.mark.parametrize("num", [1, 2, 5, 10])
def test_gradient_is_unchanged_by_the_number_of_micro_batches(num: int):
    check("qwen3_tied", replace(layout(2, {}, WHOLE), min_micro_batches=num))


def test_gradient_is_unchanged_by_the_order_of_the_groups():
    trial, hf, _ = reference("qwen3_tied")
    experience = trial.experience
    bounds = experience.cu_seqlens.tolist()
    order = [i for group in (3, 0, 4, 2, 1) for i in (2 * group, 2 * group + 1)]
    tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    shuffled = replace(
        experience,
        token_ids=experience.token_ids[tokens],
        cu_seqlens=torch.tensor([0] + [bounds[i + 1] - bounds[i] for i in order]).cumsum(0).int(),
        loss_mask=experience.loss_mask[tokens],
        rollout_logprobs=experience.rollout_logprobs[tokens],
        staleness=experience.staleness[tokens],
        rewards=experience.rewards[tokens],
        group_ids=experience.group_ids[order],
    )
    moved = replace(
        trial,
        experience=shuffled,
        advantages=trial.advantages[tokens],
        old_offsets=trial.old_offsets[tokens],
        ref_offsets=trial.ref_offsets[tokens],
    )
    outcome = run_layout(moved, layout(2, {}))
    expected = Outcome(hf.gradients, hf.logprobs[tokens], hf.metrics)
    assert_exact(compare(comparable(outcome, hf), expected))


@pytest.mark.parametrize(("granularity", "num_layers"), [("full", None), ("full", 1), ("selective", None)])
@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe"])
def test_recomputing_activations_leaves_the_gradient_unchanged(name: str, granularity: str, num_layers: int | None):
    check(name, layout(2, {"pp": 2}, recompute_granularity=granularity, recompute_num_layers=num_layers))


@pytest.mark.parametrize(
    ("name", "processes", "sizes", "modules"),
    [
        ("qwen3_tied", 1, {}, ("layernorm", "mlp_act")),
        ("qwen3_tied", 2, {"tp": 2}, ("layernorm", "mlp_act")),
        ("qwen3_tied", 2, {"tp": 2, "sp": False}, ("mlp_act",)),
        ("qwen3_moe", 1, {}, ("layernorm", "moe_act")),
        ("deepseek_v3", 2, {"ep": 2}, ("layernorm", "mlp_act", "moe_act")),
    ],
)
def test_recomputing_cheap_modules_changes_no_bit(
    name: str, processes: int, sizes: dict[str, Any], modules: tuple[str, ...]
):
    trial = reference(name)[0]
    chosen = {"recompute_granularity": "selective", "recompute_modules": modules}
    saved, again = (run_layout(trial, layout(processes, sizes, **changes)) for changes in ({}, chosen))
    assert again.metrics == saved.metrics and torch.equal(again.logprobs, saved.logprobs)
    assert all(torch.equal(gradient, saved.gradients[name]) for name, gradient in again.gradients.items())


@pytest.mark.parametrize(
    ("name", "processes", "sizes"),
    [("qwen3_tied", 1, {}), ("qwen3_tied", 2, {"tp": 2}), ("qwen3", 2, {"pp": 2})],
    ids=["one process", "TP2 SP", "PP2"],
)
def test_keeping_logits_for_backward_changes_no_bit(name: str, processes: int, sizes: dict[str, Any]):
    trial = reference(name)[0]
    again, kept = (run_layout(trial, layout(processes, sizes, recompute_logits=each)) for each in (True, False))
    assert again.metrics == kept.metrics and torch.equal(again.logprobs, kept.logprobs)
    assert all(torch.equal(gradient, kept.gradients[name]) for name, gradient in again.gradients.items())


def with_terms(trial: Trial, **changes: Any) -> Trial:
    """The trial with every term of its objective changed."""
    terms = tuple(replace(term, **changes) for term in trial.objective.terms)
    return replace(trial, objective=replace(trial.objective, terms=terms))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_is_that_of_the_whole_mini_batch(reduction: str):
    trial = with_terms(reference("qwen3_tied")[0], reduction=reduction)
    hf = hugging_face(trial)
    outcome = run_layout(trial, layout(2, {}))
    assert_exact(compare(comparable(outcome, hf), hf))


def test_each_term_may_have_a_reduction_of_its_own():
    trial = reference("qwen3_tied")[0]
    terms = zip(trial.objective.terms, ("token_mean", "sequence_mean", "prompt_mean"), strict=True)
    objective = replace(trial.objective, terms=tuple(replace(term, reduction=name) for term, name in terms))
    trial = replace(trial, objective=objective)
    hf = hugging_face(trial)
    assert_exact(compare(comparable(run_layout(trial, layout(2, {"cp": 2})), hf), hf))


VALUES = {
    **{"eps_clip_low": 0.05, "eps_clip_high": 0.05, "clip_ratio_c": 1.2, "strength": 0.01},
    **{"cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.1},
    **{"tau_pos": 1.0, "tau_neg": 1.05, "dppo_type": "binary_kl", "delta_low": 0.001, "delta_high": 0.001},
    **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    **{"token_tis_ratio_clip_high": 1.1, "sequence_tis_ratio_clip_high": 1.2, "icepop_low": 0.8, "icepop_high": 1.2},
    **{"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2, "opsm_delta": 0.01},
    **{"geo_mask_low": 0.97, "geo_mask_high": 1.03, "product_mask_low": 0.5, "product_mask_high": 2.0},
    **{"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.6},
    **{"clip_ratio": 0.1, "clip_cov_lb": 0.01, "clip_cov_ub": 5.0, "kl_cov_frac": 0.2, "ppo_kl_coef": 1.0},
    "top_entropy_quantile": 0.2,
}
LAYOUTS = {"CP2": {"cp": 2}, "TP2 SP": {"tp": 2}, "PP2": {"pp": 2}, "DP2 EP2": {"ep": 2}}
OWN = "a loss of the user"
WITH_KL = "icepop of the KL term too"
LOGLINEAR = "regular with interpolated old logprobs"


def near_engine(family: str) -> Trial:
    """Engines that were close to the trainer, so that weights lie on both sides of the bounds, and up to five versions
    behind it."""
    trial, hf, _ = reference(family)
    engine = trial.old_offsets + hf.logprobs
    generator = torch.Generator().manual_seed(5)
    noise = 0.3 * torch.randn(engine.shape, generator=generator)
    behind = torch.randint(-1, 6, engine.shape, generator=generator, dtype=torch.int32)
    return replace(trial, experience=replace(trial.experience, rollout_logprobs=engine + noise, staleness=behind))


BUCKETS = Buckets(last=2, versions_per_step=2)


@functools.cache
def with_losses(family: str) -> dict[str, Trial]:
    trial = near_engine(family)
    policy, *others = trial.objective.terms
    functions = {**{name: LOSSES[name] for name in LOSSES}, OWN: geometric}
    bound = {name: bind(function, VALUES) for name, function in functions.items()}
    terms = {name: (replace(policy, loss=loss), *others) for name, loss in bound.items()}
    trials = {name: replace(trial, objective=replace(trial.objective, terms=terms[name])) for name in bound}
    third_pass = replace(trials["regular"].objective, prox_logp_method="loglinear", num_steps=2, buckets=BUCKETS)
    return trials | {LOGLINEAR: replace(trial, objective=third_pass)}


@functools.cache
def with_corrections(family: str) -> dict[str, Trial]:
    trial = near_engine(family)
    bound = {name: (bind(CORRECTIONS[name], VALUES),) for name in CORRECTIONS}
    objective = replace(trial.objective, buckets=BUCKETS)
    trials = {name: replace(trial, objective=replace(objective, corrections=bound[name])) for name in bound}
    terms = tuple(replace(term, is_corrected=term.name == "kl") for term in objective.terms)
    corrected = replace(trials["icepop"].objective, terms=terms)
    return trials | {WITH_KL: replace(trial, objective=corrected)}


def family_of(layout_name: str) -> str:
    return "qwen3_moe" if "EP" in layout_name else "qwen3_tied"


@functools.cache
def outcomes_of(layout_name: str) -> dict[str, Outcome]:
    """Losses and corrections, all in one start of the layout's processes."""
    family = family_of(layout_name)
    trials = with_losses(family) | with_corrections(family)
    objectives = [trial.objective for trial in trials.values()]
    outcomes = run_objectives(near_engine(family), layout(2, LAYOUTS[layout_name]), objectives)
    return dict(zip(trials, outcomes, strict=True))


@functools.cache
def hugging_face_of(trials: Callable[[str], dict[str, Trial]], family: str, name: str) -> Outcome:
    return hugging_face(trials(family)[name], every_metric=True)


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("loss", [*LOSSES, OWN, LOGLINEAR])
def test_every_loss_has_hugging_faces_gradient_and_metrics(loss: str, layout_name: str):
    hf = hugging_face_of(with_losses, family_of(layout_name), loss)
    assert_exact(compare(comparable(outcomes_of(layout_name)[loss], hf), hf))


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("correction", [*CORRECTIONS, WITH_KL])
def test_every_correction_has_hugging_faces_gradient_and_metrics(correction: str, layout_name: str):
    hf = hugging_face_of(with_corrections, family_of(layout_name), correction)
    difference = compare(comparable(outcomes_of(layout_name)[correction], hf), hf)
    assert not replace(FLOAT32, metrics=5e-6).exceeded(difference)  # a product of ratios adds up their rounding
    found = {name: value for name, value in hf.metrics.items() if name.startswith("policy/correction/")}
    assert found and all(value > 0 for value in found.values()), "the bounds lie within the weights"


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_selection_is_that_of_the_mini_batch_for_every_token_limit(loss: str):
    trial = with_losses("qwen3_tied")[loss]
    corrections = (bind(CORRECTIONS["top_entropy"], VALUES),)
    trial = replace(trial, objective=replace(trial.objective, corrections=corrections))
    hf = hugging_face(trial, every_metric=True)
    assert 0 < hf.metrics[f"policy/loss_metrics/{loss}_ratio"] < 1
    for max_tokens in (16, WHOLE):
        outcome = run_layout(trial, layout(2, {}, max_tokens))
        assert_exact(compare(comparable(outcome, hf), hf))


UNEVEN = [257, 2, 1, 3, 130, 2, 5, 64, 2, 17]
"""Samples of one to 257 tokens, some with a single response token, one with nothing but its first token."""


@pytest.mark.parametrize(
    ("processes", "sizes"),
    [(2, {}), (2, {"pp": 2}), (2, {"cp": 2}), (2, {"tp": 2}), (4, {"pp": 2, "vpp": 2})],
    ids=["DP2", "PP2", "CP2", "TP2 SP", "DP2 PP2 VPP2"],
)
def test_uneven_lengths_neither_deadlock_nor_change_the_gradient(processes: int, sizes: dict[str, Any]):
    trial = make_trial(model("qwen3_tied"), UNEVEN)
    hf = hugging_face(trial)
    assert_exact(compare(comparable(run_layout(trial, layout(processes, sizes)), hf), hf))


@pytest.mark.parametrize("sample_lengths", [[40], [40, 9, 30]], ids=["one rank has none", "one rank has one"])
@pytest.mark.parametrize(
    ("name", "processes", "sizes"),
    [("qwen3_tied", 2, {}), ("qwen3_tied", 4, {"pp": 2}), ("qwen3_moe", 2, {"ep": 2})],
    ids=["DP2", "DP2 PP2", "EP2"],
)
def test_a_rank_with_one_sample_or_none_takes_part(
    name: str, processes: int, sizes: dict[str, Any], sample_lengths: list[int]
):
    trial = make_trial(model(name), sample_lengths)
    hf = hugging_face(trial)
    assert_exact(compare(comparable(run_layout(trial, layout(processes, sizes)), hf), hf))


def test_fully_masked_samples_change_nothing():
    trial = make_trial(model("qwen3_tied"), lengths())
    bounds = trial.experience.cu_seqlens.tolist()
    mask = trial.experience.loss_mask.clone()
    for sample in (0, 1, 5):
        mask[bounds[sample] : bounds[sample + 1]] = False
    trial = replace(trial, experience=replace(trial.experience, loss_mask=mask))
    hf = hugging_face(trial)
    for sizes in ({}, {"cp": 2}):
        assert_exact(compare(comparable(run_layout(trial, layout(2, sizes)), hf), hf))


def test_a_mini_batch_without_a_trained_token_has_a_gradient_of_zero():
    trial = make_trial(model("qwen3_tied"))
    nothing = torch.zeros_like(trial.experience.loss_mask)
    outcome = run_layout(replace(trial, experience=replace(trial.experience, loss_mask=nothing)), layout(2, {"pp": 2}))
    assert all(not gradient.any() for gradient in outcome.gradients.values())
    assert outcome.metrics["policy/final_loss"] == 0
    assert "policy/policy_entropy" not in outcome.metrics, "0 would raise an adaptive weight of the entropy"


def balance_of(whole: Any, coefficient: float) -> Callable[[], torch.Tensor]:
    """coefficient * E * sum_e f_e * P_e of each router over the tokens of all forward passes, from its logits."""
    logits: dict[str, list[torch.Tensor]] = {}
    for name, module in whole.named_modules():
        if name.endswith("mlp.gate"):
            logits[name] = []
            module.register_forward_hook(lambda _, __, out, to=logits[name]: to.append(out[0]))

    def loss() -> torch.Tensor:
        total = torch.zeros(())
        for parts in logits.values():
            scores = torch.cat(parts).softmax(-1)
            taken = scores.topk(whole.config.num_experts_per_tok, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter_(1, taken, 1.0)
            total = total + scores.shape[1] * (chosen.sum(0) / chosen.sum() * scores.mean(0)).sum()
        return coefficient * total

    return loss


@pytest.mark.parametrize(
    ("processes", "sizes", "recompute"),
    [
        (1, {}, None),
        (1, {}, "full"),
        (1, {}, "one layer"),
        (2, {"tp": 2}, None),
        (2, {"ep": 2}, None),
        (2, {"cp": 2}, None),
        (2, {"pp": 2}, "selective"),
        (2, {"pp": 2, "vpp": 2}, "full"),
    ],
    ids=lambda value: None if isinstance(value, int) else str(value),
)
def test_the_load_balancing_loss_is_that_of_the_whole_mini_batch(processes: int, sizes: dict[str, Any], recompute: Any):
    trial = reference("qwen3_moe")[0]
    whole = load(trial)
    hf = hugging_face(trial, model=whole, aux_loss=balance_of(whole, coefficient=0.5))
    changes = {"moe_aux_loss_coeff": 0.5, "recompute_granularity": recompute, "recompute_modules": ("moe",)}
    if recompute == "one layer":
        changes |= {"recompute_granularity": "full", "recompute_num_layers": 1}
    outcome = run_layout(trial, layout(processes, sizes, **changes))
    assert_exact(compare(comparable(outcome, hf), hf))


def test_a_frozen_router_has_no_gradient_and_all_else_has_its_own():
    trial, hf, _ = reference("qwen3_moe")
    outcome = run_layout(trial, layout(2, {"ep": 2}, freeze_moe_router=True))
    routers = {name for name in hf.gradients if ".gate." in name}
    assert routers and all(not outcome.gradients[name].any() for name in routers)
    rest = {name: g for name, g in outcome.gradients.items() if name not in routers}
    expected = {name: g for name, g in hf.gradients.items() if name not in routers}
    difference = compare(Outcome(rest, outcome.logprobs, {}), Outcome(expected, hf.logprobs, {}))
    assert difference.gradient <= FLOAT32.gradient


UNEVEN_STAGES: dict[str, tuple[str, dict[str, int], int, dict[str, int]]] = {
    "7 layers PP2 VPP2": ("qwen3_tied", {"num_hidden_layers": 7}, 2, {"pp": 2, "vpp": 2}),
    "a stage of dense layers alone": (
        "deepseek_v3",
        {"num_hidden_layers": 5, "first_k_dense_replace": 3},
        4,
        {"pp": 2, "ep": 2},
    ),
}


@pytest.mark.parametrize(("name", "changes", "processes", "sizes"), UNEVEN_STAGES.values(), ids=UNEVEN_STAGES)
def test_uneven_stages_have_hugging_faces_gradient(
    name: str, changes: dict[str, int], processes: int, sizes: dict[str, int], tmp_path: Path
):
    trial = make_trial(write_family(name, tmp_path, **changes))
    hf = hugging_face(trial)
    assert_exact(compare(comparable(run_layout(trial, layout(processes, sizes)), hf), hf))


def test_the_norm_of_many_gradients_does_not_depend_on_how_they_are_cut(tmp_path: Path):
    """Half a million numbers in the embedding: added one by one in float32 their norm is 1e-5 off."""
    trial = make_trial(write_family("qwen3_tied", tmp_path, num_hidden_layers=2, vocab_size=8003))
    hf = hugging_face(trial)
    for processes, sizes in ((1, {}), (2, {}), (2, {"tp": 2})):
        outcome = run_layout(trial, layout(processes, sizes))
        assert outcome.metrics["policy/grad_norm"] == pytest.approx(norm(outcome), rel=2e-7)
        assert_exact(compare(comparable(outcome, hf), hf))


def norm(outcome: Outcome) -> float:
    return float(torch.cat([gradient.double().flatten() for gradient in outcome.gradients.values()]).norm())
