import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.reductions import MaxLengths, loss_weights, weighted_sum
from skyrl_train.algorithms.tables import REDUCTIONS

LENGTHS = MaxLengths(response=10, conversation=14)
MEANS = ["token_mean", "sequence_mean", "prompt_mean"]


def ragged(masks):
    """Masks of samples -> loss_mask [T], cu_seqlens [B + 1]."""
    bounds = torch.tensor([0] + [len(m) for m in masks]).cumsum(0).to(torch.int32)
    return torch.tensor([bit for m in masks for bit in m], dtype=torch.bool), bounds


# Two groups; trained tokens per sample 2, 1, 0 (fully masked) and 3; the last group has none at all.
MASK, BOUNDS = ragged([[0, 1, 1], [0, 1, 0, 0], [0, 0], [0, 0, 1, 1, 1], [0, 0, 0]])
GROUPS = torch.tensor([4, 4, 4, 9, 11])


@pytest.mark.parametrize(
    ("reduction", "per_sample"),
    [
        ("token_mean", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence_mean", [1 / (2 * 3), 1 / (1 * 3), 1 / (3 * 3)]),
        ("seq_mean_token_sum_norm", [1 / (3 * 14)] * 3),
        ("dr_grpo", [1 / (3 * 10)] * 3),
        ("prompt_mean", [1 / (3 * 2), 1 / (3 * 2), 1 / (3 * 2)]),
    ],
)
def test_weights_of_each_reduction(reduction, per_sample):
    a, b, d = per_sample
    expected = torch.tensor([0, a, a] + [0, b, 0, 0] + [0, 0] + [0, 0, d, d, d] + [0, 0, 0], dtype=torch.float32)
    torch.testing.assert_close(loss_weights(reduction, MASK, BOUNDS, GROUPS, LENGTHS), expected, rtol=1e-7, atol=0)


def test_prompt_mean_gives_each_group_the_same_share():
    mask, bounds = ragged([[1, 1, 1], [1], [1, 1]])
    weights = loss_weights("prompt_mean", mask, bounds, torch.tensor([0, 0, 1]), LENGTHS)
    torch.testing.assert_close(weights, torch.tensor([1 / 8] * 4 + [1 / 4] * 2))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_mini_batch_without_trained_tokens_has_only_zero_weights(reduction):
    mask, bounds = ragged([[0, 0], [0]])
    weights = loss_weights(reduction, mask, bounds, torch.tensor([0, 1]), LENGTHS)
    assert weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_fully_masked_sample_changes_no_other_weight(reduction):
    masks = [[0, 1, 1], [1], [0, 1, 1, 1]]
    groups = [0, 0, 1]
    mask, bounds = ragged(masks)
    alone = loss_weights(reduction, mask, bounds, torch.tensor(groups), LENGTHS)
    mask, bounds = ragged([*masks, [0, 0]])
    beside = loss_weights(reduction, mask, bounds, torch.tensor([*groups, 2]), LENGTHS)
    assert torch.equal(beside, torch.cat([alone, torch.zeros(2)]))


samples = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 3)), min_size=1, max_size=12
)


@pytest.mark.parametrize("reduction", MEANS)
@settings(deadline=None)
@given(samples=samples)
def test_weights_of_a_mean_sum_to_one(reduction, samples):
    mask, bounds = ragged([m for m, _ in samples])
    weights = loss_weights(reduction, mask, bounds, torch.tensor([g for _, g in samples]), LENGTHS)
    assert float(weights.double().sum()) == pytest.approx(1.0 if mask.any() else 0.0, abs=1e-6)
    assert torch.equal(weights != 0, mask)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(deadline=None)
@given(samples=samples, seed=st.integers(0, 100))
def test_weights_follow_their_samples_when_these_are_permuted(reduction, samples, seed):
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = []
    for rows in (samples, [samples[i] for i in order]):
        mask, bounds = ragged([m for m, _ in rows])
        weights = loss_weights(reduction, mask, bounds, torch.tensor([g for _, g in rows]), LENGTHS)
        cut.append(weights.split(bounds.diff().tolist()))
    assert all(torch.equal(cut[1][new], cut[0][old]) for new, old in enumerate(order))


def test_an_unknown_reduction_is_answered_with_the_nearest_valid_one():
    with pytest.raises(ValueError, match="loss_reduction is tokenmean: did you mean token_mean"):
        loss_weights("tokenmean", MASK, BOUNDS, GROUPS, LENGTHS)


def test_weighted_sum_passes_neither_value_nor_gradient_of_a_token_without_weight():
    terms = torch.tensor([2.0, float("inf"), float("nan")], requires_grad=True)
    total = weighted_sum(terms, torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 1.0 and terms.grad.tolist() == [0.5, 0.0, 0.0]
