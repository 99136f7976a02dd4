"""The order of samples, and how they are split, change neither credit, nor the loss, nor a metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.credit import CreditInputs, advantages
from skyrl_train.algorithms.inputs import PerSample, TokenInputs
from skyrl_train.algorithms.metrics import partial_sums
from skyrl_train.algorithms.objective import Objective, Term, objective_loss
from skyrl_train.algorithms.reductions import MaxLengths, loss_weights
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, LOSSES, REDUCTIONS
from skyrl_train.batching.build import build_experience, credit_inputs
from skyrl_train.config import load_config
from skyrl_train.rollout.shaping import has_signal
from skyrl_train.types import Group, Prompt, Sample

VALUES = load_config().trainer.algorithm.values
ONE_REWARD = [name for name in ADVANTAGES if name != "gae"]  # a critic's values are a signal of their own


@st.composite
def groups(draw: st.DrawFn, min_groups: int = 1) -> list[Group]:
    """Groups of different sizes; samples of different lengths, some without a trained token."""
    result = []
    for uid in range(draw(st.integers(min_groups, 4))):
        samples = [draw(samples_of_tokens()) for _ in range(draw(st.integers(1, 4)))]
        greedy = (draw(samples_of_tokens()),)
        result.append(Group(Prompt(str(uid), [], "addition", {}, "sums"), tuple(samples), greedy))
    return result


@st.composite
def samples_of_tokens(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 5))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, -0.1]), min_size=length, max_size=length))
    mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
    numbers = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    return Sample(
        token_ids=torch.tensor(numbers),
        loss_mask=torch.tensor(mask),
        rollout_logprobs=-torch.tensor(numbers) / 4 - 0.1,
        prompt_length=0,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        stop_reason="stop",
        turns=1,
        policy_version=0,
        named_rewards={"a": draw(st.sampled_from([0.0, 1.0])), "b": draw(st.sampled_from([0.2, 0.7]))},
    )


def credit(estimator: str, inputs: CreditInputs) -> list[Tensor]:
    """The trained tokens' advantages of each sample."""
    bound = bind(ADVANTAGES[estimator], VALUES)
    found = advantages(bound.function, inputs, bound.parameters).masked_fill(~inputs.loss_mask, 0)
    return list(torch.split(found, inputs.cu_seqlens.diff().tolist()))


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # equal rewards: 0 up to rounding


@pytest.mark.parametrize("estimator", ONE_REWARD)
@settings(deadline=None, max_examples=15)
@given(made=groups(), data=st.data())
def test_the_order_of_groups_and_samples_does_not_change_credit(estimator: str, made: list[Group], data: st.DataObject):
    if estimator == "pass@k":  # the first of several best samples is chosen
        made = [replace(group, samples=group.samples[:1]) for group in made]
    order = data.draw(st.permutations(range(len(made))))
    within = [data.draw(st.permutations(range(len(group.samples)))) for group in made]
    moved = [replace(made[i], samples=tuple(made[i].samples[j] for j in within[i])) for i in order]
    starts = [sum(len(group.samples) for group in made[:i]) for i in range(len(made))]
    positions = [starts[i] + j for i in order for j in within[i]]
    whole = credit(estimator, credit_inputs(build_experience(made, 0)))
    assert_same([whole[i] for i in positions], credit(estimator, credit_inputs(build_experience(moved, 0))))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl", "opo", "pass@k", "remax"])
@settings(deadline=None, max_examples=15)
@given(made=groups(min_groups=2), data=st.data())
def test_credit_within_groups_does_not_depend_on_the_other_groups(
    estimator: str, made: list[Group], data: st.DataObject
):
    cut = data.draw(st.integers(1, len(made) - 1))
    whole = credit(estimator, credit_inputs(build_experience(made, 0)))
    parts = [credit(estimator, credit_inputs(build_experience(part, 0))) for part in (made[:cut], made[cut:])]
    assert_same(whole, [*parts[0], *parts[1]])


@settings(deadline=None, max_examples=30)
@given(made=groups(min_groups=2), data=st.data())
def test_filtering_then_splitting_is_splitting_then_filtering(made: list[Group], data: st.DataObject):
    cut = data.draw(st.integers(0, len(made)))
    parts = [[group for group in part if has_signal(group)] for part in (made[:cut], made[cut:])]
    kept = [group for group in made if has_signal(group)]
    assert [group.prompt.uid for part in parts for group in part] == [group.prompt.uid for group in kept]


def evaluated(
    objective: Objective, made: list[Group], order: Sequence[int], sizes: Sequence[int]
) -> tuple[float, Tensor, dict[str, list[float]]]:
    """Loss, the gradient of each sample's logprobs and the sums of all metrics, over micro-batches of these sizes."""
    experience = build_experience(made, 0)
    lengths = experience.lengths.tolist()
    weights = {
        name: loss_weights(
            name, experience.loss_mask, experience.cu_seqlens, experience.group_ids, MaxLengths(5, 10)
        ).double()
        for name in objective.reductions
    }
    noise = torch.linspace(-0.3, 0.3, len(experience.token_ids), dtype=torch.float64)
    engine = experience.rollout_logprobs.double()
    logprobs = (engine + noise).requires_grad_()
    values: dict[str, Tensor] = {
        "old_logprobs": engine + noise.flip(0) / 2,
        "rollout_logprobs": engine,
        "advantages": torch.repeat_interleave(torch.linspace(-1, 1, len(lengths)).double(), torch.tensor(lengths)),
        "ref_logprobs": engine - 0.1,
        "entropy": -logprobs,
        **{f"selected_by_{selection.name}": torch.arange(len(noise)) % 3 == 0 for selection in objective.selections},
    }
    pieces = {name: torch.split(tensor, lengths) for name, tensor in values.items()}
    shares = {name: torch.split(tensor, lengths) for name, tensor in weights.items()}
    own, masks = torch.split(logprobs, lengths), torch.split(experience.loss_mask, lengths)
    total, sums, position = torch.zeros((), dtype=torch.float64), dict[str, list[Tensor]](), 0
    for size in sizes:
        chosen = order[position : position + size]
        position += size
        mask = torch.cat([masks[i] for i in chosen])
        sample = torch.cat([torch.full((lengths[i],), k) for k, i in enumerate(chosen)])
        per_sample = PerSample(sample, len(chosen), mask)
        signals = {name: torch.cat([parts[i] for i in chosen]) for name, parts in pieces.items()}
        tokens = TokenInputs(torch.cat([own[i] for i in chosen]), mask, per_sample, signals)
        loss, metrics = objective_loss(
            objective, tokens, {name: torch.cat([parts[i] for i in chosen]) for name, parts in shares.items()}
        )
        total = total + loss
        for name, metric in metrics.items():
            part = partial_sums(metric, mask, per_sample.num_tokens)
            held = sums.get(name)
            is_max = metric.reduce.name == "MAX"
            sums[name] = [part] if held is None else [torch.maximum(held[0], part) if is_max else held[0] + part]
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad, {name: held[0].tolist() for name, held in sums.items()}


FUNCTIONS: list[tuple[str, str | None]] = [(loss, None) for loss in LOSSES] + [
    ("regular", name) for name in CORRECTIONS
]


@pytest.mark.parametrize(("loss", "correction"), FUNCTIONS)
@settings(deadline=None, max_examples=10)
@given(made=groups(), data=st.data())
def test_order_and_split_change_neither_loss_nor_gradient_nor_metric(
    loss: str, correction: str | None, made: list[Group], data: st.DataObject
):
    reduction = data.draw(st.sampled_from(list(REDUCTIONS)))
    corrections = () if correction is None else (bind(CORRECTIONS[correction], VALUES),)
    objective = Objective((Term("policy", bind(LOSSES[loss], VALUES), 1.0, reduction),), 1.0, corrections=corrections)
    number = sum(len(group.samples) for group in made)
    order: Any = data.draw(st.permutations(range(number)))
    sizes = []
    while sum(sizes) < number:
        sizes.append(data.draw(st.integers(1, number - sum(sizes))))
    whole = evaluated(objective, made, range(number), [number])
    split = evaluated(objective, made, order, sizes)
    assert split[0] == pytest.approx(whole[0], rel=1e-6, abs=1e-9)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-6, atol=1e-9)
    assert split[2].keys() == whole[2].keys()
    for name, numbers in whole[2].items():
        assert split[2][name] == pytest.approx(numbers, rel=1e-6, abs=1e-9), name
