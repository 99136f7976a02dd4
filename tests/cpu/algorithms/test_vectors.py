"""What other frameworks' own functions give for the same inputs (tests/data/algorithm_vectors.json).

Every record of the file is compared, or is in a table of deliberate differences with its reason.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.advantages.gae import gae
from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.controllers import adapted_kl_coef
from skyrl_train.algorithms.credit import CreditInputs, advantages, whitened
from skyrl_train.algorithms.distillation import kl_to_teacher, teacher_advantages, topk_forward, topk_reverse
from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.losses.value import clipped_value_loss
from skyrl_train.algorithms.objective import Bound
from skyrl_train.algorithms.reductions import MaxLengths, loss_weights
from skyrl_train.algorithms.selection import MiniBatch, selected
from skyrl_train.algorithms.staleness import loglinear
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES
from skyrl_train.batching import build
from skyrl_train.types import ExperienceBatch

DATA = json.loads(Path(__file__, "../../../data/algorithm_vectors.json").resolve().read_text())
ALL_SAMPLES = {"skyrl_v04", "skyrl", "trl", "roll"}
"""Peers whose means over samples and groups count those without a trained token."""
INF = math.inf


def records(kind: str, methods: Any) -> list[Any]:
    return [
        pytest.param(record, case, id=f"{record['method']} {record['peer']} {record['dtype']} {case.get('batch', '')}")
        for record in DATA["vectors"]
        if record["kind"] == kind and record["method"] in methods
        for case in record["cases"]
    ]


def token_batch(case: dict[str, Any]) -> dict[str, Tensor]:
    kind, name = case["batch"].split("/")
    batch = DATA["batches"][kind][name]
    return {
        key: torch.tensor(value, dtype=torch.float64 if isinstance(value[0], float) else None)
        for key, value in batch.items()
        if isinstance(value, list) and value
    }


def token_inputs(batch: dict[str, Tensor], *, one_sample_per_token: bool = False, **others: Tensor) -> TokenInputs:
    mask = batch["loss_mask"].bool()
    lengths = batch["cu_seqlens"].diff()
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if one_sample_per_token:
        sample = torch.arange(len(mask))
    names = ("old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs")
    signals = {name: batch[name].double() for name in names} | others
    logprobs = batch["logprobs"].double().clone().requires_grad_()
    return TokenInputs(logprobs, mask, PerSample(sample, int(sample.max()) + 1, mask), signals)


def with_selections(tokens: TokenInputs, batch: dict[str, Tensor], function: Bound) -> TokenInputs:
    """Peers select by the current policy, which is the old one in the first update."""
    if function.selection is None:
        return tokens
    ids = torch.arange(len(tokens.loss_mask))
    old = {"old_logprobs": batch["logprobs"], "old_entropy": batch["entropies"]}
    whole = MiniBatch(ids, batch["cu_seqlens"].int(), tokens.loss_mask, batch["advantages"], old)
    return replace(tokens, signals={**tokens.signals, **selected([function.selection], whole)})


def weights(batch: dict[str, Tensor], reduction: str, peer: str) -> Tensor:
    mask = batch["loss_mask"].bool()
    if reduction == "sum":
        return mask.double()
    result = loss_weights(reduction, mask, batch["cu_seqlens"], batch["group_ids"], MaxLengths(16, 16)).double()
    if reduction != "token_mean" and (peer.split()[0] in ALL_SAMPLES or peer == "verl gmpo"):
        written = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[batch["cu_seqlens"]].diff() > 0
        ids = batch["group_ids"] if reduction == "prompt_mean" else torch.arange(len(written))
        result = result * (len(ids[written].unique()) / len(ids.unique()))
    return result


CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
HIGHER = {"eps_clip_low": 0.2, "eps_clip_high": 0.28}
TIGHT = {"eps_clip_low": 3e-4, "eps_clip_high": 4e-4}
FIVE = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 4.0}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
TV = {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2}
LOSS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo_clip": ("regular", CLIP),
    "ppo_clip_sequence_mean": ("regular", CLIP),
    "ppo_clip_dr_grpo": ("regular", CLIP),
    "clip_higher": ("regular", HIGHER),
    "dual_clip": ("dual_clip", CLIP | {"clip_ratio_c": 3.0}),
    "two_sided_clip": ("dual_clip", CLIP | {"clip_ratio_c": 4.0}),
    "gspo": ("gspo", TIGHT),
    "gspo_wide": ("gspo", CLIP),
    "gspo_token": ("gspo", CLIP),
    "gmpo": ("gmpo", {"eps_clip_low": 0.4, "eps_clip_high": 0.4}),
    "cispo": ("cispo", FIVE),
    "tis_reinforce": ("cispo", {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": 0.0}),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "sapo_token_mean": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "dppo_tv": ("dppo", TV),
    "dppo_kl": ("dppo", TV | {"dppo_type": "binary_kl", "delta_low": 0.05, "delta_high": 0.05}),
    "rollout_is": ("rollout_is", HIGHER),
    "vespo": ("vespo", VESPO),
    "topr": ("topr", {}),
    "importance_sampling": ("importance_sampling", {}),
    "gpg_loss": ("reinforce", {}),
    "reinforce": ("reinforce", {}),
    "force_on_policy": ("reinforce", {}),
    "cross_entropy": ("cross_entropy", {}),
    "clip_cov": ("clip_cov", CLIP | {"clip_ratio": 1.0, "clip_cov_lb": 0.02, "clip_cov_ub": 5.0}),
    "kl_cov": ("kl_cov", {"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0}),
}
REDUCTION = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "mean over all samples": "sequence_mean",
    "sum / (B * max_completion_length)": "dr_grpo",
    "sum of terms * loss_mask": "sum",
    "sum": "sum",
    "token_mean (held out: sequence_mean)": "token_mean",
}


ANY = {"token_tis_ratio_clip_high": INF, "sequence_tis_ratio_clip_high": INF}
COMPOSED: dict[str, tuple[str, dict[str, Any], list[str], str | None]] = {
    "ppo_clip_tis_token": ("regular", CLIP | {"token_tis_ratio_clip_high": 2.0}, ["token_tis"], None),
    "ppo_clip_is_token": ("regular", CLIP | ANY, ["token_tis"], None),
    "ppo_clip_icepop": ("regular", CLIP | {"icepop_low": 0.5, "icepop_high": 5.0}, ["icepop"], None),
    "ppo_clip_seq_mask_tis": (
        "regular",
        CLIP | ANY | {"geo_mask_low": 0.85, "geo_mask_high": 1.2},
        ["token_tis", "geometric_mask"],
        None,
    ),
    "gspo_is_sequence": ("gspo", CLIP | ANY, ["sequence_tis"], None),
    "decoupled_ppo": ("regular", HIGHER | {"token_tis_ratio_clip_high": 5.0}, ["token_tis"], None),
    "decoupled_ppo_mask": ("regular", HIGHER | {"icepop_low": 0.7, "icepop_high": 1.4}, ["icepop"], None),
    "top_entropy": ("regular", CLIP | {"top_entropy_quantile": 0.23}, ["top_entropy"], None),
    "mopd": ("reinforce", {"icepop_low": 0.5, "icepop_high": 2.0}, ["icepop"], None),
    "gspo_rollout": ("gspo", CLIP, [], None),
    "ppo_clip_kl_k2": ("regular", CLIP, [], "k2"),
    "ppo_clip_kl_k3": ("regular", CLIP, [], "k3"),
    "ppo_clip_kl_unbiased": ("regular", CLIP, [], "k3"),
}
DIFFERENT = {
    ("batch_normalised_advantages", "skyrl_v04", "*"): "the mean is over padding too there, a known bug",
    ("token_mean", "roll", "*"): "the mask is not applied to the terms there, a known bug",
    ("seq_mean_token_sum_norm", "roll", "*"): "the divisor is the padded width there, and not times the samples",
    ("per_turn_reinforce++", "skyrl", "*"): "a reward does not reach the turns before it there, a known bug",
    ("per_turn_reinforce++", "skyrl_v04", "*"): "a reward does not reach the turns before it there, a known bug",
    ("reinforce++_baseline", "verl", "uneven"): "a group of one keeps its reward there, and shifts the mean of all",
    ("clip_cov", "skyrl", "*"): "the reduction is in the advantages there, so other tokens lie between the bounds",
    ("kl_cov", "skyrl", "*"): "the reduction is in the advantages there, so the penalty is larger by the tokens",
    ("gdpo", "verl", "*"): "normalised over tokens there, here over samples as in the paper",
    ("gdpo", "nemo_rl", "uneven"): "a group of one shifts the mean of all there",
    ("correction_combined", "skyrl", "extreme"): "tokens that one mask drops are not seen by the next there",
    ("ppo_clip_kl_k3", "trl", "extreme"): "log-ratios of the KL term are not clamped there",
    ("ppo_clip_kl_unbiased", "trl", "extreme"): "log-ratios of the KL term are not clamped there",
    ("ppo_clip_kl_unbiased", "nemo_rl", "*"): "the ratio is to the engine there",
    ("ppo_clip_kl_k2", "nemo_rl", "*"): "the term has a score-function weight there: gradient k2 + d instead of d",
    ("ppo_clip_kl_k3", "nemo_rl", "extreme"): "the value of the KL term is clamped at 10 there",
    ("kl_cov", "*", "extreme"): "log-ratios are clamped at +-20 here",
    ("importance_sampling", "*", "extreme"): "log-ratios are clamped at +-20 here",
    ("dppo_tv", "verl", "extreme"): "verl caps the ratio at clip_ratio_c, here the trust region alone bounds it",
    ("dppo_kl", "verl", "extreme"): "verl caps the ratio at clip_ratio_c, here the trust region alone bounds it",
}


def peer_of(record: dict[str, Any]) -> str:
    return f"{record['peer']} gmpo" if record["method"] == "gmpo" else record["peer"]


def skip_different(record: dict[str, Any], case: dict[str, Any]) -> None:
    batch = case.get("batch", "").split("/")[-1]
    for peer in (record["peer"], "*"):
        for name in (batch, "*"):
            if reason := DIFFERENT.get((record["method"], peer, name)):
                pytest.skip(f"a deliberate difference: {reason}")


@pytest.mark.parametrize(("record", "case"), records("loss", LOSS))
def test_a_loss_has_the_gradient_of_its_peers(record: dict[str, Any], case: dict[str, Any]):
    name, parameters = LOSS[record["method"]]
    if record["method"] == "dual_clip" and record["peer"] == "roll":
        parameters = parameters | {"clip_ratio_c": 1.4}
    skip_different(record, case)
    batch = token_batch(case)
    if record["method"].startswith("dppo") and record["peer"] == "verl":
        batch["rollout_logprobs"] = batch["old_logprobs"]
    # ROLL's ratio of TOPR is a token's, the paper's and ours a sample's.
    tokens = token_inputs(batch, one_sample_per_token=record["method"] == "topr")
    loss = bind(LOSSES[name], parameters)
    terms = loss(with_selections(tokens, batch, loss)).terms
    (terms * weights(batch, REDUCTION[record["reduction"]], peer_of(record))).sum().backward()
    expected = torch.tensor(case["outputs"]["grad_logprobs"], dtype=torch.float64)
    torch.testing.assert_close(tokens.logprobs.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("record", "case"), records("loss", COMPOSED))
def test_a_loss_with_corrections_and_kl_has_the_gradient_of_its_peers(record: dict[str, Any], case: dict[str, Any]):
    skip_different(record, case)
    name, parameters, corrections, kl = COMPOSED[record["method"]]
    batch = token_batch(case)
    if record["method"] == "mopd":
        batch["advantages"] = batch["teacher_logprobs"] - batch["old_logprobs"]
    if record["method"] == "gspo_rollout":
        batch["old_logprobs"] = batch["rollout_logprobs"]
    tokens = token_inputs(batch)
    terms = bind(LOSSES[name], parameters)(tokens).terms
    for correction in corrections:
        bound = bind(CORRECTIONS[correction], parameters)
        terms = terms * bound(with_selections(tokens, batch, bound)).factor
    if kl == "k3" and record["peer"] == "nemo_rl":
        kl = "k3+"  # its term has a score-function weight
    if kl is not None:
        value = KL_ESTIMATORS[kl](tokens.logprobs, tokens.ref_logprobs)
        if record["method"] == "ppo_clip_kl_unbiased":
            value = value * (tokens.logprobs - tokens.old_logprobs).exp()
        terms = terms + 0.05 * value
    (terms * weights(batch, REDUCTION[record["reduction"]], record["peer"])).sum().backward()
    expected = torch.tensor(case["outputs"]["grad_logprobs"], dtype=torch.float64)
    torch.testing.assert_close(tokens.logprobs.grad, expected, rtol=1e-5, atol=1e-7)


CORRECTION: dict[str, tuple[list[str], dict[str, float]]] = {
    "tis_token": (["token_tis"], {"token_tis_ratio_clip_high": 2.0}),
    "tis_sequence": (["sequence_tis"], {"sequence_tis_ratio_clip_high": 5.0}),
    "icepop": (["icepop"], {"icepop_low": 0.5, "icepop_high": 5.0}),
    "token_mask": (["token_mask"], {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25}),
    "sequence_mask_geometric": (["geometric_mask"], {"geo_mask_low": 0.85, "geo_mask_high": 1.2}),
    "sequence_mask_product": (["product_mask"], {"product_mask_low": 0.5, "product_mask_high": 2.0}),
    "outlier_sequence_mask": (
        ["outlier_mask"],
        {"outlier_token_is_threshold_low": 0.01, "outlier_token_is_threshold_high": 8.0},
    ),
    "correction_combined": (
        ["token_tis", "geometric_mask", "outlier_mask"],
        {
            **{"token_tis_ratio_clip_high": 2.0, "geo_mask_low": 0.8, "geo_mask_high": 1.3},
            **{"outlier_token_is_threshold_low": 0.01, "outlier_token_is_threshold_high": 50.0},
            **{"token_mask_is_threshold_low": 0.6, "token_mask_is_threshold_high": 1.8},
        },
    ),
    "sequence_mask_is": (
        ["sequence_tis", "product_mask"],
        {"sequence_tis_ratio_clip_high": INF, "product_mask_low": 0.0, "product_mask_high": 3.0},
    ),
    "mis_token_mask": (["icepop"], {"icepop_low": 0.5, "icepop_high": 2.0}),
    "mis_geometric_rejection_veto": (
        ["token_tis", "geometric_mask", "outlier_mask"],
        {
            **{"token_tis_ratio_clip_high": 2.0, "geo_mask_low": 0.85, "geo_mask_high": 1.2},
            **{"outlier_token_is_threshold_low": 0.01, "outlier_token_is_threshold_high": INF},
        },
    ),
    "opsm": (["opsm"], {"opsm_delta": 0.05}),
    # verl bounds the inverse ratio: the bounds are inverted here.
    "rejection_token_k1": (["token_mask"], {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25}),
    "rejection_seq_sum_k1": (["product_mask"], {"product_mask_low": 0.5, "product_mask_high": 2.0}),
    "rejection_seq_mean_k1": (["geometric_mask"], {"geo_mask_low": 1 / 1.2, "geo_mask_high": 1 / 0.85}),
}


KEYS = ("weights", "token_mask", "loss_mask")


@pytest.mark.parametrize(("record", "case"), records("correction", CORRECTION))
def test_a_correction_weighs_tokens_as_its_peers_do(record: dict[str, Any], case: dict[str, Any]):
    skip_different(record, case)
    names, parameters = CORRECTION[record["method"]]
    if record["method"] == "correction_combined" and record["peer"] == "skyrl":
        names = [*names, "token_mask"]
    batch, outputs = token_batch(case), case["outputs"]
    tokens = token_inputs(batch)
    lengths = batch["cu_seqlens"].diff()
    factor = torch.ones(len(tokens.loss_mask), dtype=torch.float64)
    for name in names:
        factor = factor * bind(CORRECTIONS[name], parameters)(tokens).factor
    expected = torch.ones_like(factor)
    # AReaL's weight of a kept sample is the geometric mean, whatever the mask was made of: only its mask is compared.
    given = ("loss_mask",) if record["peer"] == "areal" and "sequence" in record["method"] else KEYS
    for key in given:
        if key in outputs:
            expected = expected * torch.tensor(outputs[key], dtype=torch.float64)
    for key in ("sample_weights", "sample_mask"):
        if key in outputs:
            expected = expected * torch.repeat_interleave(torch.tensor(outputs[key], dtype=torch.float64), lengths)
    mask = tokens.loss_mask
    torch.testing.assert_close(factor[mask], expected[mask], rtol=1e-5, atol=1e-7)


KL = {
    "kl_k1": "k1",
    "kl_k2": "k2",
    "kl_k3": "k3",
    "kl_abs": "abs",
    "kl_k1_straight_through": "k1+",
    "kl_k3_straight_through": "k3+",
    "kl_abs_straight_through": "abs+",
}


@pytest.mark.parametrize(("record", "case"), records("kl", KL))
def test_a_kl_estimator_has_the_value_and_gradient_of_its_peers(record: dict[str, Any], case: dict[str, Any]):
    skip_different(record, case)
    batch, outputs = token_batch(case), case["outputs"]
    mask = batch["loss_mask"].bool()
    logprobs = batch["logprobs"].clone().requires_grad_()
    values = KL_ESTIMATORS[KL[record["method"]]](logprobs, batch["ref_logprobs"])
    values[mask].sum().backward()
    expected = torch.tensor(outputs["values"], dtype=torch.float64)
    # Peers clamp the value at 10 or the log-ratio at 20, where the gradient is 0 then.
    mask &= (values.detach().abs() < 10) & ((logprobs - batch["ref_logprobs"]).abs() < 20)
    torch.testing.assert_close(values.detach()[mask], expected[mask], rtol=1e-5, atol=1e-7)
    if outputs.get("grad_logprobs") is not None:
        gradient = torch.tensor(outputs["grad_logprobs"], dtype=torch.float64)
        torch.testing.assert_close(logprobs.grad[mask], gradient[mask], rtol=1e-5, atol=1e-7)


ADVANTAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"grpo_norm_by_std": True}),
    "grpo_no_std": ("grpo", {"grpo_norm_by_std": False}),
    "per_turn_grpo": ("grpo", {"grpo_norm_by_std": True}),
    "rloo": ("rloo", {}),
    "per_turn_rloo": ("rloo", {}),
    "reinforce++": ("reinforce++", {"gamma": 1.0}),
    "per_turn_reinforce++": ("reinforce++", {"gamma": 0.9}),
    "reinforce++_baseline": ("reinforce++_baseline", {}),
    "maxrl": ("maxrl", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {}),
    "pass@k": ("pass@k", {"grpo_norm_by_std": True}),
    "gdpo": ("gdpo", {"grpo_norm_by_std": True, "gdpo_reward_weights": {}}),
    "remax": ("remax", {}),
}


def credit_inputs(case: dict[str, Any]) -> CreditInputs:
    batch = token_batch(case)
    if "token_rewards" in batch:
        rewards, mask = batch["token_rewards"], batch["loss_mask"].bool()
        return CreditInputs(rewards.double(), mask, batch["cu_seqlens"].int(), batch["group_ids"])
    lengths = batch["lengths"]
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    rewards = torch.zeros(int(bounds[-1]), dtype=torch.float64)
    rewards[bounds[1:] - 1] = batch["rewards"].double()
    kind, name = case["batch"].split("/")
    components = DATA["batches"][kind][name].get("reward_components", {})
    return CreditInputs(
        rewards,
        torch.ones(len(rewards), dtype=torch.bool),
        bounds.int(),
        batch["group_ids"],
        named_rewards={key: torch.tensor(values, dtype=torch.float64) for key, values in components.items()},
        baselines=batch.get("greedy_rewards"),
    )


REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")


@pytest.mark.parametrize(("record", "case"), records("reduction", REDUCTIONS))
def test_a_reduction_weighs_tokens_as_its_peers_do(record: dict[str, Any], case: dict[str, Any]):
    skip_different(record, case)
    batch = token_batch(case)
    result = weights(batch, record["method"], record["peer"])
    expected = torch.tensor(case["outputs"]["grad_terms"], dtype=torch.float64)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)


ESTIMATOR_EPS = {"trl": 3e-4, "areal": 3e-5, "prime_rl": 1e-5}
"""Relative tolerance where a peer adds another constant to its divisor."""
POPULATION_VARIANCE = {"nemo_rl", "openrlhf"}
"""Peers whose variance over tokens divides by N, and not by N - 1."""


@pytest.mark.parametrize(("record", "case"), records("advantage", ADVANTAGE))
def test_an_estimator_gives_the_advantages_of_its_peers(record: dict[str, Any], case: dict[str, Any]):
    skip_different(record, case)
    name, parameters = ADVANTAGE[record["method"]]
    inputs, outputs, peer = credit_inputs(case), case["outputs"], record["peer"]
    result = advantages(bind(ADVANTAGES[name], parameters).function, inputs, parameters).double()
    if "token_advantages" in outputs:
        expected = torch.tensor(outputs["token_advantages"], dtype=torch.float64)
    else:
        expected = inputs.at_tokens(torch.tensor(outputs["advantages"], dtype=torch.float64))
    mask = inputs.loss_mask.clone()
    if name.startswith("reinforce++") and peer in POPULATION_VARIANCE:
        expected = expected * math.sqrt((int(mask.sum()) - 1) / int(mask.sum()))
    elif not name.startswith(("reinforce++", "remax")):
        # A sample alone in its group has no advantage here; some peers give it its reward.
        _, group, size = torch.unique(inputs.group_ids, return_inverse=True, return_counts=True)
        alone = size[group] == 1
        assert not result[inputs.at_tokens(alone)].any()
        mask &= ~inputs.at_tokens(alone)
    tolerance = ESTIMATOR_EPS.get(peer, 2e-6)
    atol = tolerance if name == "gdpo" else 2e-6  # it subtracts a mean
    torch.testing.assert_close(result[mask], expected[mask], rtol=tolerance, atol=atol)


GAE = ("gae", "gae_whitened")
STEPS_OF_ENVIRONMENT = {"skyrl", "skyrl_v04", "slime", "roll", "openrlhf"}
"""Peers to whom tokens of the environment are time steps."""


@pytest.mark.parametrize(("record", "case"), records("advantage", GAE))
def test_gae_is_that_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    batch, outputs = token_batch(case), case["outputs"]
    if record["peer"] in STEPS_OF_ENVIRONMENT and not bool(batch["loss_mask"].all()):
        pytest.skip("a deliberate difference: tokens of the environment are time steps there")
    inputs = replace(credit_inputs(case), signals={"values": batch["values"]})
    result = gae(inputs, gamma=0.99, lambd=0.95)
    expected, returns = (torch.tensor(outputs[f"token_{name}"]).double() for name in ("advantages", "returns"))
    if record["method"] == "gae":
        expected = whitened(expected, inputs.loss_mask)
    mask = inputs.loss_mask
    torch.testing.assert_close(result.advantages[mask], expected[mask], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(result.returns[mask], returns[mask], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("record", "case"), records("value", ("value_loss",)))
def test_the_value_loss_has_the_gradient_of_its_peers(record: dict[str, Any], case: dict[str, Any]):
    batch, outputs, peer = token_batch(case), case["outputs"], record["peer"]
    mask, names = batch["loss_mask"].bool(), ("old_values", "returns")
    values = batch["values"].double().clone().requires_grad_()
    signals = {"values": values, **{name: batch[name].double() for name in names}}
    terms, metrics = clipped_value_loss(
        TokenInputs(values, mask, token_inputs(batch).per_sample, signals), value_clip=0.2
    )
    reduction = "sequence_mean" if "sequence" in record["reduction"] or peer == "slime" else "token_mean"
    (terms * weights(batch, reduction, peer)).sum().backward()
    gradient = values.grad
    if peer == "slime":  # a sum over samples, without the half
        gradient = (
            gradient * 2 * int((torch.nn.functional.pad(mask.cumsum(0), (1, 0))[batch["cu_seqlens"]].diff() > 0).sum())
        )
    expected = torch.tensor(outputs["grad_values"], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    if "clipfrac" in outputs:
        assert float(metrics["clip_ratio"].values[mask].mean()) == pytest.approx(outputs["clipfrac"])


@pytest.mark.parametrize(("record", "case"), records("advantage", ("batch_normalised_advantages",)))
def test_normalised_advantages_are_those_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    skip_different(record, case)
    batch = token_batch(case)
    mask = batch["loss_mask"].bool()
    expected = torch.tensor(case["outputs"]["token_advantages"], dtype=torch.float64)
    tolerance = ESTIMATOR_EPS.get(record["peer"], 2e-6)
    torch.testing.assert_close(
        whitened(batch["advantages"], mask)[mask], expected[mask], rtol=tolerance, atol=tolerance
    )


TEACHER = {"opd_advantage": True, "opd_advantage_pure": False, "mopd_advantage": False}
"""Method -> whether the rewards' advantages are added to those of the teacher."""


@pytest.mark.parametrize(("record", "case"), records("distillation", TEACHER))
def test_advantages_of_a_teacher_are_those_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    batch = token_batch(case)
    if not TEACHER[record["method"]]:
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    tokens = token_inputs(batch, teacher_logprobs=batch["teacher_logprobs"])
    result = teacher_advantages(tokens, distillation_coef=1.0)
    expected = torch.tensor(case["outputs"]["token_advantages"], dtype=torch.float64)
    torch.testing.assert_close(result[tokens.loss_mask], expected[tokens.loss_mask], rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize(("record", "case"), records("distillation", ("opd_reverse_kl_estimator",)))
def test_the_reverse_kl_of_a_teacher_is_that_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    batch = token_batch(case)
    tokens = token_inputs(batch, teacher_logprobs=batch["teacher_logprobs"])
    estimator = KL_ESTIMATORS[record["parameters"]["loss_mode"]]
    terms = kl_to_teacher(tokens, estimator=estimator).terms.detach()
    expected = torch.tensor(case["outputs"]["values"], dtype=torch.float64)
    mask = tokens.loss_mask & (expected.abs() < 10)  # verl clamps there
    torch.testing.assert_close(terms[mask], expected[mask], rtol=1e-6, atol=1e-7)


FORWARD, REVERSE = {topk_forward: 1.0}, {topk_reverse: 1.0}
TOPK = {
    **{"topk_forward_kl": FORWARD, "topk_kl_forward": FORWARD, "topk_kl_reverse": REVERSE},
    "topk_kl_mixed": {topk_forward: 0.5, topk_reverse: 0.5},
    **{"topk_jsd_beta0": FORWARD, "topk_jsd_beta1": REVERSE},
    **{"gkd_forward_kl": FORWARD, "gkd_reverse_kl": REVERSE, "kd_forward_kl": FORWARD, "kd_reverse_kl": REVERSE},
}
"""Method -> share of each term; gkd and kd are over the whole vocabulary."""


@pytest.mark.parametrize(("record", "case"), records("distillation", TOPK))
def test_a_kl_over_the_teachers_likeliest_tokens_is_that_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    kind, name = case["batch"].split("/")
    batch, outputs = DATA["batches"][kind][name], case["outputs"]
    logits = torch.tensor(batch["student_logits"], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(batch["teacher_logits"], dtype=torch.float64).log_softmax(-1)
    mask = torch.tensor(batch["loss_mask"], dtype=torch.bool)
    k = teacher.shape[1] if record["method"].startswith(("gkd", "kd")) else batch["k"]
    best, ids = teacher.topk(k)
    signals = {"topk_logprobs": logits.log_softmax(-1).gather(1, ids), "teacher_topk_logprobs": best}
    per_sample = PerSample(torch.zeros(len(mask), dtype=torch.int64), 1, mask)
    tokens = TokenInputs(logits[:, 0], mask, per_sample, signals)
    values = torch.stack([share * term(tokens).terms for term, share in TOPK[record["method"]].items()]).sum(0)
    is_mean = "loss" in outputs
    loss = values[mask].mean() if is_mean else values[mask].sum()
    loss.backward()
    if is_mean:
        assert float(loss) == pytest.approx(outputs["loss"], rel=1e-5)
    else:
        expected = torch.tensor(outputs["values"], dtype=torch.float64)
        torch.testing.assert_close(values.detach()[mask], expected[mask], rtol=2e-5, atol=1e-6)
    gradient = torch.tensor(outputs["grad_logits"], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("record", "case"), records("proximal", ("proximal_loglinear",)))
def test_interpolated_old_logprobs_are_those_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    """The peer's current policy is one version ahead of the policy before the step in all mini-batches."""
    batch = token_batch(case)
    mask, versions = batch["loss_mask"].bool(), batch["versions"]
    behind = (record["parameters"]["current_version"] - 1 - versions).int().masked_fill(versions < 0, -1)
    found = loglinear(batch["logprobs"].double(), batch["rollout_logprobs"].double(), behind, num_steps=1)
    expected = torch.tensor(case["outputs"]["proximal_logprobs"], dtype=torch.float64)
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-6, atol=1e-6)
    assert len({*behind[mask].clamp(min=0).tolist()}) > 2, "several versions"


DISTILLATION = {*TEACHER, *TOPK, "opd_reverse_kl_estimator"}
NOT_HERE = {
    **dict.fromkeys(
        ("dro", "kimi15", "ipo_tv", "dppo_tv_kl", "cispo_unified_mask", "vespo_is"), "a peer's own variant"
    ),
    **dict.fromkeys(
        ("rloo_loss", "luspo", "reinforce_is", "bypass_reinforce", "bypass_ppo_clip"), "a peer's own variant"
    ),
    "opsm_loss": "TRL measures the distance to the engine, the paper and this package to the policy before the step",
    "opd_ref_kl": "a peer's own variant of distillation",
    "opd_advantage_discounted": "the KL of later tokens is in their own advantages",
    **dict.fromkeys(("topk_kl_reverse_zero_outside", "gkd_jsd", "topk_jsd_beta0.5"), "a peer's own divergence"),
    **dict.fromkeys(("kd_js_divergence", "kd_skewed_forward_kl", "kd_skewed_reverse_kl"), "a peer's own divergence"),
    "kd_adaptive_kl": "a peer's own divergence",
    **dict.fromkeys(("gae_vapo", "gae_turn_level"), "a peer's own variant"),
    **dict.fromkeys(("grpo_batch_std", "batch_normalised_rewards", "rloo_batch_normalised"), "a peer's own variant"),
    **dict.fromkeys(("grpo_leave_one_out", "grpo_length_penalty", "rae", "discounted_returns"), "a peer's own variant"),
    **dict.fromkeys(("reinforce++_returns_kl", "reinforce++_baseline_kl", "otb", "otb_multi_turn"), "a peer's own"),
    **dict.fromkeys(("grpo_equal_rewards_float32", "grpo_leave_one_out_residue"), "rounding of peers in float32"),
    **dict.fromkeys(
        ("icepop_sequence", "tis_geometric_clip", "kpop", "kpop_sequence_max", "m2po"), "a peer's own variant"
    ),
    **dict.fromkeys(("tis_token_batch_normalised", "tis_sequence_batch_normalised"), "a peer's own variant"),
    **dict.fromkeys(("ess_per_sample", "ess_per_sample_token_weighted", "offpolicy_metrics"), "metrics of a peer"),
    **dict.fromkeys(("kl_k3_clamped", "kl_k3_score_function"), "k3 with a clamp or with another gradient: see k3+"),
    **dict.fromkeys(("token_mean_legacy", "token_sum", "seq_mean_token_sum"), "depends on the split, or has no mean"),
    **dict.fromkeys(
        ("sum_of_sample_mean", "sum_of_sample_mean_rollout"), "sequence_mean and prompt_mean without a divisor"
    ),
    "kl_k3_unbiased": "in ppo_clip_kl_unbiased",
    **dict.fromkeys(("rejection_token_k2", "rejection_token_k3"), "masks here bound the ratio, not a KL estimate"),
    **dict.fromkeys(
        ("rejection_seq_mean_k2", "rejection_seq_mean_k3", "rejection_seq_max_k3", "rejection_seq_max_k2,token_k1"),
        "masks here bound the ratio, not a KL estimate",
    ),
    **dict.fromkeys(("overlong_soft_punishment", "zero_variance_filter"), "in tests/cpu/rollout/test_shaping.py"),
    **dict.fromkeys(
        ("dynamic_sampling_filter", "dynamic_sampling_replace"), "other prompts are sampled one for one here"
    ),
    "overlong_filter": "here a sample is masked that reached the length limit, there one that has no end token",
    **dict.fromkeys(("stop_properly_penalty", "zero_advantage_filter"), "a peer's own variant"),
    "proximal_linear": "a peer's own variant of loglinear",
}


@pytest.mark.parametrize(("record", "case"), records("kl", ("adaptive_kl_controller",)))
def test_the_adaptive_kl_controller_is_that_of_the_peers(record: dict[str, Any], case: dict[str, Any]):
    coef, inputs = record["parameters"]["init_kl_coef"], case["inputs"]
    expected = case["outputs"]["coef_after_each_update"]
    for kl, num_samples, after in zip(inputs["current_kl"], inputs["n_steps"], expected, strict=True):
        coef = adapted_kl_coef(coef, kl, kl_target=0.1, horizon=10000, num_samples=num_samples)
        assert coef == pytest.approx(after, rel=1e-8)


@pytest.mark.parametrize(("record", "case"), records("kl", ("kl_in_reward",)))
def test_the_kl_penalty_is_subtracted_from_the_reward_of_each_trained_token(
    record: dict[str, Any], case: dict[str, Any]
):
    batch = token_batch(case)
    mask, bounds = batch["loss_mask"].bool(), batch["cu_seqlens"]
    rewards, empty = torch.zeros(len(mask), dtype=torch.float64), torch.zeros(len(mask))
    for sample, reward in enumerate(batch["rewards"].tolist()):
        trained = torch.nonzero(mask[bounds[sample] : bounds[sample + 1]])
        if len(trained):
            rewards[bounds[sample] + trained[-1]] = reward
    experience = ExperienceBatch(empty.long(), bounds.int(), mask, batch["group_ids"], empty, empty.int(), rewards)
    kl = KL_ESTIMATORS["k1"](batch["old_logprobs"], batch["ref_logprobs"])
    found = build.credit_inputs(experience, kl, 0.1).rewards
    expected = torch.tensor(case["outputs"]["token_rewards"], dtype=torch.float64)
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_each_record_is_compared_or_has_a_reason_not_to_be():
    compared = {
        "batch_normalised_advantages",
        "adaptive_kl_controller",
        "kl_in_reward",
        *LOSS,
        *COMPOSED,
        *CORRECTION,
        *KL,
        *ADVANTAGE,
        *DISTILLATION,
        *REDUCTIONS,
        *GAE,
        "value_loss",
        "proximal_loglinear",
    }
    methods = {record["method"] for record in DATA["vectors"]}
    assert not methods - compared - NOT_HERE.keys()
    assert not compared & NOT_HERE.keys()
