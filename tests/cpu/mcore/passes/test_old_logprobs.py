"""An update of several optimizer steps compares with logprobs that were kept for it, or raises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.megatron.passes.old_logprobs import OldLogprobs, old_logprobs
from skyrl_train.types import TrainBatch

BATCH = TrainBatch(
    token_ids=torch.tensor([3, 4, 5]),
    cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
    loss_mask=torch.tensor([False, True, True]),
    loss_weights={},
    signals={},
    sample_ids=torch.zeros(1, dtype=torch.int64),
    mini_batches=(((0,),),),
    step_id=3,
)
VALUES = torch.tensor([0.0, -1.0, -2.0])
KEPT = OldLogprobs(3, 7, VALUES)
OTHER = replace(BATCH, step_id=4)


@pytest.mark.parametrize("num_optimizer_steps", [1, 2])
def test_kept_logprobs_of_this_step_and_these_weights_are_compared_with(num_optimizer_steps: int):
    assert old_logprobs(KEPT, BATCH, 7, num_optimizer_steps) is VALUES


@pytest.mark.parametrize(
    ("kept", "batch", "version", "found"),
    [
        (None, BATCH, 7, "none are kept"),
        (KEPT, OTHER, 7, "of step 3 and version 7"),
        (KEPT, BATCH, 8, "of step 3 and version 7"),
        (OldLogprobs(3, 7, None), OTHER, 7, "of step 3"),
    ],
)
def test_several_steps_without_their_old_logprobs_raise_and_one_step_needs_none(kept, batch, version, found):
    with pytest.raises(RuntimeError, match=f"an update of 4 optimizer steps needs the old logprobs .*{found}"):
        old_logprobs(kept, batch, version, 4)
    assert old_logprobs(kept, batch, version, 1) is None
    assert old_logprobs(kept, batch, version, 4, "loglinear") is None, "each pass makes its own"


def test_a_stage_without_the_output_layer_keeps_none_and_raises_for_nothing():
    assert old_logprobs(OldLogprobs(3, 7, None), BATCH, 7, 4) is None
