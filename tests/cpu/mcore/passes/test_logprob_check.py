"""Updates whose samples the engine sampled from another distribution than the trainer's are refused on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.objective import Bound
from skyrl_train.megatron.passes.old_logprobs import compared_tokens
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import LogprobLimit, Rendezvous, UpdateReport
from skyrl_train.types import TrainBatch
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import layout

LENGTHS = [7, 30, 12, 9, 25, 40, 3, 18]
ADAM = replace(OPTIMIZER, lr=1e-2)
STALE = 5
"""Index of a sample of an earlier version, whose logprobs are another model's."""


@dataclass(frozen=True)
class Case:
    """An update of samples whose engine was off by `error` at every token."""

    error: float
    limit: float
    of_kept: bool
    num_mini_batches: int = 1


def _update(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, list[Case]]) -> list[dict[str, Any]]:
    trial, one, cases = arguments
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, ADAM, objective, bf16=False, seed=1, num_optimizer_steps=9
    )
    found = []
    is_compared = torch.ones(len(LENGTHS), dtype=torch.bool)
    is_compared[STALE] = False
    for case in cases:
        batch = share_of(trial, one, policy.ranks, num_mini_batches=case.num_mini_batches)
        policy.keep_old_logprobs(batch)
        kept = None if policy._old is None else policy._old.values
        values = torch.zeros(len(batch.token_ids)) if kept is None else kept
        policy._old = policy._old if case.of_kept else None
        stale = torch.repeat_interleave(batch.sample_ids == STALE, batch.cu_seqlens.diff().long())
        sampled = torch.where(stale, values - 5.0, values + case.error)
        before = {name: tensor.clone() for name, tensor in policy.export(torch.float32)}
        report = policy.update(
            replace(batch, signals={**batch.signals, "rollout_logprobs": sampled * batch.loss_mask}),
            limit=LogprobLimit(case.limit, is_compared, case.of_kept),
        )
        changed = any(not torch.equal(tensor, before[name]) for name, tensor in policy.export(torch.float32))
        found.append({"report": report, "changed": changed, "version": policy.num_steps})
    return found


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize(
    ("processes", "sizes"),
    [(1, {}), (2, {}), (2, {"pp": 2}), (2, {"cp": 2}), (2, {"tp": 2})],
    ids=["one process", "DP2", "PP2", "CP2", "TP2 SP"],
)
def test_all_ranks_refuse_other_logprobs_before_a_weight_changes(processes: int, sizes: dict[str, Any], dense: Path):
    """Both ways: against logprobs that were kept (of all mini-batches), and of the update's first forward pass."""
    cases = [
        Case(error, limit, of_kept, 2 if of_kept else 1)
        for of_kept in (False, True)
        for error, limit in ((0.25, 0.2), (math.nan, 0.2), (0.25, 0.3))
    ]
    parts = run_on_ranks(
        _update, (make_trial(dense, LENGTHS), layout(processes, sizes), cases), processes, timeout_s=120
    )
    for number, case in enumerate(cases):
        reports: list[UpdateReport] = [part[number]["report"] for part in parts]
        refused = not case.error <= case.limit
        assert [report.is_refused for report in reports] == [refused] * processes
        for report in reports:
            assert report.logprob_difference == pytest.approx(case.error, rel=1e-5, nan_ok=True), "without the stale"
        assert {part[number]["changed"] for part in parts} == {not refused}
        assert {part[number]["version"] for part in parts} == {(0, 0, 1, 1, 1, 3)[number]}


def test_only_trained_tokens_of_compared_samples_are_compared():
    batch = TrainBatch(
        token_ids=torch.arange(6),
        cu_seqlens=torch.tensor([0, 2, 5, 6], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, False, True, True, True]),
        loss_weights={},
        signals={},
        sample_ids=torch.tensor([4, 0, 2]),
        mini_batches=(((0, 1, 2),),),
    )
    is_compared = torch.tensor([True, False, False, False, True])
    assert compared_tokens(batch, is_compared).tolist() == [False, True, False, True, True, False]


class RaisesLater:
    """A loss that raises in a later call."""

    num_calls_left = 0

    def __call__(self, tokens: TokenInputs) -> LossTerms:
        self.num_calls_left -= 1
        if self.num_calls_left < 0:
            raise KeyError("mine")
        return LossTerms(-tokens.logprobs * tokens.advantages)


def _raise_later(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> tuple[int, bool]:
    trial, one, num_mini_batches = arguments
    loss = RaisesLater()
    term = replace(trial.objective.terms[0], loss=Bound(loss))
    objective = replace(trial.objective, terms=(term,))
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, ADAM, objective, bf16=False, seed=1, num_optimizer_steps=9
    )
    batch = share_of(trial, one, policy.ranks, num_mini_batches=num_mini_batches)
    policy.keep_old_logprobs(batch)
    loss.num_calls_left = len(batch.mini_batches[0]) - (num_mini_batches == 1)
    before = {name: tensor.clone() for name, tensor in policy.export(torch.float32)}
    with pytest.raises(RuntimeError, match="policy_loss_type: .*RaisesLater raised KeyError: 'mine'"):
        policy.update(batch)
    changed = any(not torch.equal(tensor, before[name]) for name, tensor in policy.export(torch.float32))
    return policy.steps_begun(), changed


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_whose_loss_raises_tells_whether_an_optimizer_step_was_begun(processes: int, dense: Path):
    """In the last micro-batch of the only mini-batch, and in the first one of the second mini-batch."""
    for num_mini_batches, steps in ((1, 0), (4, 1)):
        arguments = make_trial(dense, LENGTHS), layout(processes, {}), num_mini_batches
        assert run_on_ranks(_raise_later, arguments, processes, timeout_s=120) == [(steps, steps > 0)] * processes
