"""A pass through a pipeline runs ahead of its GPUs: the host waits for none of its messages."""

from __future__ import annotations

import pytest

from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from tests.support.families import make_trial
from tests.support.host_waits import pass_without_waiting
from tests.support.layouts import layout, model

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(300)]


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "vpp": 2}], ids=["PP2", "PP2 VPP2"])
def test_the_host_waits_for_no_message_between_stages(sizes: dict[str, int]):
    trial = make_trial(model("qwen3"), [50, 3, 17, 41, 8, 60, 22, 5])
    found = run_on_ranks(pass_without_waiting, (trial, layout(2, sizes, transformer_impl="torch")), 2, timeout_s=200)
    assert found[0] == found[1] >= 4
