"""Several optimizer steps of the real policy end at the same weights under every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.kl import k2
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.objective import Bound, Term
from skyrl_train.megatron.optimizer import optimizer as optimizers
from skyrl_train.megatron.optimizer.optimizer import learning_rate
from skyrl_train.megatron.passes.step import batch_logprobs
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import layout

NUM_STEPS = 4
# With a large eps a step is nearly proportional to the gradient, so rounding is not blown up to lr * sign(gradient).
ADAM = replace(OPTIMIZER, lr=1e-2, adam_eps=1e-2, weight_decay=0.1, scheduler="linear", num_warmup_steps=1)


def _train(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> dict[str, Any]:
    """Two epochs of two mini-batches."""
    trial, one = arguments
    finalize, calls = optimizers.finalize_model_grads, []

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        finalize(*args, **kwargs)

    optimizers.finalize_model_grads = counted
    prepared: list[int] = []
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, ADAM, objective, bf16=False, seed=1, num_optimizer_steps=NUM_STEPS
    )
    # The process ends with the test, and the patches with it.
    for part in getattr(policy._optimizer, "chained_optimizers", [policy._optimizer]):
        prepare = part.prepare_grads
        part.prepare_grads = lambda prepare=prepare: (prepared.append(1), prepare())[1]
    batch = share_of(trial, one, policy.ranks, num_mini_batches=2)
    policy.keep_old_logprobs(replace(batch, step_id=batch.step_id - 1))  # a job that fails before its update
    with pytest.raises(RuntimeError, match="an update of 4 optimizer steps needs the old logprobs of step 0"):
        policy.update(batch, epochs=2)
    policy.keep_old_logprobs(batch)
    report = policy.update(batch, epochs=2)
    head = [
        (name, parameter.detach().clone())
        for module in policy.model.modules
        for name, parameter in module.named_parameters()
        if name in ("output_layer.weight", "embedding.word_embeddings.weight")
    ]
    weights = {name: tensor.clone() for name, tensor in policy.export(torch.float32)}
    return {
        "weights": weights if policy.ranks.owns_stage else {},
        "metrics": report.metrics,
        "version": policy.num_steps,
        "finalized": len(calls),
        "prepared": len(prepared) / len(getattr(policy._optimizer, "chained_optimizers", [1])),
        "head": head,
    }


def train(
    path: Path, processes: int, sizes: dict[str, Any], *, masked: bool = False, poisoned: bool = False
) -> tuple[dict[str, Tensor], dict[str, float], list[Any]]:
    """Args: masked: no token is trained on; poisoned: the advantage of one sample is NaN."""
    trial = make_trial(path, [7, 30, 12, 9, 25, 40, 3, 18])
    if masked:
        nothing = torch.zeros_like(trial.experience.loss_mask)
        trial = replace(trial, experience=replace(trial.experience, loss_mask=nothing))
    if poisoned:
        trial.advantages[: int(trial.experience.cu_seqlens[1])] = math.nan
    parts = run_on_ranks(_train, (trial, layout(processes, sizes)), processes, timeout_s=120)
    weights = {name: tensor for part in parts for name, tensor in part["weights"].items()}
    return weights, next(part["metrics"] for part in parts if part["metrics"]), parts


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize(
    ("kind", "processes", "sizes"),
    [
        ("dense", 2, {}),
        ("dense", 2, {"tp": 2}),
        ("dense", 2, {"cp": 2}),
        ("dense", 2, {"pp": 2, "vpp": 2}),
        ("dense", 4, {"pp": 2}),
        ("experts", 2, {"ep": 2}),
        ("experts", 2, {"tp": 2, "etp": 1}),
    ],
    ids=["DP2", "TP2 SP", "CP2", "PP2 VPP2", "DP2 PP2", "EP2", "TP2 ETP1"],
)
def test_training_ends_at_the_same_weights(
    kind: str, processes: int, sizes: dict[str, Any], request: pytest.FixtureRequest
):
    path = request.getfixturevalue(kind)
    weights, metrics, parts = train(path, processes, sizes)
    expected, expected_metrics, alone = train(path, 1, {})
    assert weights.keys() == expected.keys()
    source = load_file(path / "model.safetensors")
    assert max(float((tensor - source[name]).abs().max()) for name, tensor in weights.items()) > 1e-3, "it was trained"
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name} {text}"
        )
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert {part["version"] for part in parts} == {NUM_STEPS}
    for counted in ("finalized", "prepared"):
        assert {part[counted] for part in (*parts, *alone)} == {NUM_STEPS}, "once for each optimizer step"
    assert metrics["policy/num_optimizer_steps"] == NUM_STEPS and metrics["policy/num_skipped_steps"] == 0


@pytest.mark.parametrize("processes", [2, 4], ids=["PP2", "PP4"])
def test_a_tied_head_stays_equal_to_the_embedding(processes: int, dense: Path):
    """The first stage and the last hold a copy each; their gradients are summed and their updates are the same."""
    *_, parts = train(dense, processes, {"pp": processes})
    first, last = dict(parts[0]["head"]), dict(parts[-1]["head"])
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


def test_matrices_decay_and_norms_do_not(dense: Path):
    """Without a gradient only weight decay is left; Megatron's parameter groups would decay norms too."""
    weights, *_ = train(dense, 2, {}, masked=True)
    rates = [learning_rate(step, NUM_STEPS, ADAM) for step in range(NUM_STEPS)]
    decay = math.prod(1 - ADAM.weight_decay * rate for rate in rates)
    for name, before in load_file(dense / "model.safetensors").items():
        expected = before if before.dim() == 1 else before * decay
        torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-7)


def test_a_gradient_that_is_not_finite_changes_no_weight_on_any_rank(dense: Path):
    """The NaN is in one of the two mini-batches, on one of the ranks; the other mini-batch is trained on."""
    weights, metrics, parts = train(dense, 2, {}, poisoned=True)
    source = load_file(dense / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(not torch.equal(tensor, source[name]) for name, tensor in weights.items())
    assert metrics["policy/num_skipped_steps"] == 2 and math.isnan(metrics["policy/grad_norm"])
    assert {part["version"] for part in parts} == {NUM_STEPS}


def share_of_the_way(tokens: TokenInputs) -> LossTerms:
    """How far the old logprob is from the engine's to the current one."""
    way = (tokens.old_logprobs - tokens.rollout_logprobs) / (tokens.logprobs.detach() - tokens.rollout_logprobs)
    return LossTerms(-tokens.logprobs, {"share": Metric(way, Reduce.TOKEN_MEAN)})


def _score(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> dict[str, Any]:
    trial, one = arguments
    objective = replace(trial.objective, kl_estimator=k2, temperature=0.7)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, ADAM, objective, bf16=False, seed=1, num_optimizer_steps=1
    )
    batch = share_of(trial, one, policy.ranks)
    sampled, plain = (batch_logprobs(policy.model, policy._packer, batch, t) for t in (0.7, 1.0))
    assert sampled is not None
    terms = (sampled + 5.0).square() / 2
    logprobs = policy.prompt_logprobs(batch)
    kl = policy.keep_old_logprobs(batch, torch.full_like(sampled, -5.0))
    policy.keep_old_logprobs(replace(batch, step_id=batch.step_id - 1))  # a job that fails before its update
    report = policy.update(batch, ref_logprobs=torch.zeros_like(sampled))
    loglinear = replace(
        objective, terms=(Term("policy", Bound(share_of_the_way)),), prox_logp_method="loglinear", corrections=()
    )
    twice_behind = {"rollout_logprobs": torch.full_like(sampled, -20.0), "staleness": torch.full(sampled.shape, 2)}
    stale = replace(batch, signals={**batch.signals, **twice_behind})
    return {
        "interpolated": policy.update(stale, 3, loglinear).metrics["policy/loss_metrics/share"],
        "report": report,
        "plain": plain,
        "logprobs": logprobs,
        "kl": kl["kl"],
        "expected_kl": terms,
    }


@pytest.fixture(scope="module")
def scored(dense: Path) -> dict[str, Any]:
    (result,) = run_on_ranks(_score, (make_trial(dense, [7, 30, 12, 9]), layout(1, {})), 1, timeout_s=120)
    return result


def test_the_rewards_kl_is_of_the_configured_estimator_at_the_sampling_temperature(scored: dict[str, Any]):
    torch.testing.assert_close(scored["kl"], scored["expected_kl"])
    kl = scored["report"].metrics["policy/approx_kl"]
    assert abs(kl) < 1e-6, "an update compared with the logprobs of another job"


def test_interpolated_old_logprobs_need_no_pass_before_and_count_the_optimizer_steps_of_the_update(scored):
    """Samples of two versions before: 2/2, 2/3 and 2/4 of the way in the three steps."""
    assert scored["interpolated"] == pytest.approx((1 + 2 / 3 + 2 / 4) / 3, rel=1e-5)


def test_logprobs_are_those_of_temperature_1(scored: dict[str, Any]):
    """As engines score prompts; the check after a sync compares the two."""
    assert torch.equal(scored["logprobs"], scored["plain"])


def test_what_is_computed_before_an_update_is_no_part_of_its_time(scored: dict[str, Any]):
    report = scored["report"]
    assert 0 < report.busy_seconds < report.schedule_seconds <= report.seconds
