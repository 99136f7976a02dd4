"""The weights of a checkpoint reach Megatron's model in a time that grows with their number, not with its square."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import write_family
from tests.support.layouts import layout


def _count_state_dicts(rendezvous: Rendezvous, path: str) -> int:
    """State dictionaries of the model that building it creates; each visits every tensor."""
    counts, original = Counter[str](), GPTModel.state_dict

    def counted(self: GPTModel, *args: Any, **kwargs: Any) -> Any:
        counts["state_dict"] += 1
        return original(self, *args, **kwargs)

    GPTModel.state_dict = counted
    megatron = layout(1, {}).megatron
    join(rendezvous, megatron, seed=1)
    build_model(path, megatron, torch.float32, trainable=False)
    return counts["state_dict"]


def test_loading_visits_the_model_a_fixed_number_of_times(tmp_path: Path):
    path = str(write_family("qwen3_moe", tmp_path))
    (count,) = run_on_ranks(_count_state_dicts, path, 1, timeout_s=120)
    assert 0 < count < 10  # one for every tensor with mbridge's own loop
