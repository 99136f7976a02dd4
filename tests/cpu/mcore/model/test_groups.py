"""Groups of one rank, those used between passes and a pipeline's are shared: each has a communicator on a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.megatron.model import parallel
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.layouts import layout


def _groups(rendezvous: Rendezvous, config: MegatronConfig) -> dict[str, Any]:
    """Members of each group that this process is in; what is added up over some of them."""
    join(rendezvous, config, 1)
    sums = []
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_embedding_group(),
    ):
        ranks = torch.tensor(float(rendezvous.rank + 1))
        dist.all_reduce(ranks, group=group)
        sums.append(float(ranks))
    made = dist.distributed_c10d._world.pg_group_ranks.items()
    return {
        "members": sorted(len(ranks) for group, ranks in made if isinstance(group, dist.ProcessGroup)),
        "sums": sums,
        "timeouts": {
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group, _ in made
            if isinstance(group, dist.ProcessGroup)
        },
        "pipeline is apart": parallel_state.get_pipeline_model_parallel_group()
        is not parallel_state.get_model_parallel_group(),
    }


def test_one_rank_has_one_group():
    (found,) = run_on_ranks(_groups, layout(1, {}).megatron, 1, timeout_s=60)
    assert found["members"] == [1] and found["sums"] == [1.0] * 5


@pytest.mark.parametrize(("sizes", "members"), [({"pp": 2}, [1, 2]), ({"pp": 2, "vpp": 2}, [1, 2, 2])])
def test_ranks_of_a_pipeline_share_a_group_unless_its_messages_overlap(sizes: dict[str, int], members: list[int]):
    """Of Megatron's 24 groups: those of one rank, the default one, and a pipeline's with virtual stages."""
    found = run_on_ranks(_groups, layout(2, sizes).megatron, 2, timeout_s=60)
    for rank, one in enumerate(found):
        assert one["members"] == members and one["pipeline is apart"] == ("vpp" in sizes)
        assert one["timeouts"] == {60.0}, "none has Megatron's 30 minutes"
        assert one["sums"] == [rank + 1.0, rank + 1.0, 3.0, 3.0, 3.0]


def test_groups_of_the_same_number_of_ranks_are_distinguished():
    """Two pipelines of two ranks: 0 with 2, and 1 with 3."""
    found = run_on_ranks(_groups, layout(4, {"pp": 2}).megatron, 4, timeout_s=60)
    assert [one["sums"] for one in found] == [
        [1.0, 3.0, 4.0, 4.0, 4.0],
        [2.0, 3.0, 6.0, 6.0, 6.0],
        [3.0, 7.0, 4.0, 4.0, 4.0],
        [4.0, 7.0, 6.0, 6.0, 6.0],
    ]


def _channels(rendezvous: Rendezvous, config: MegatronConfig) -> tuple[int, dict[tuple[str, int], int | None]]:
    """Of the default group, and of each that is made, by Megatron's name and number of ranks; None is NCCL's choice."""
    asked: dict[tuple[str, int], int | None] = {}
    create, init = parallel_state.create_group, dist.init_process_group

    def note(ranks: list[int], **kwargs: Any) -> Any:
        asked[kwargs["group_desc"], len(ranks)] = kwargs["pg_options"]
        return create(ranks, **kwargs)

    # gloo ignores the options, so the number itself can be one.
    with (
        patch.object(parallel, "few_channels", lambda count, timeout: count),
        patch.object(dist, "init_process_group", MagicMock(wraps=init)) as default,
        patch.object(parallel_state, "create_group", note),
    ):
        join(rendezvous, config, 1)
    return default.call_args.kwargs["pg_options"], asked


def test_groups_that_send_little_have_few_channels_and_those_of_one_rank_one():
    sizes = {"tp": 2, "pp": 2, "vpp": 2}  # so that the pipeline's and the embedding's are two
    (default, asked), *_ = run_on_ranks(_channels, layout(4, sizes).megatron, 4, timeout_s=60)
    assert default == 8
    assert asked["PIPELINE_MODEL_PARALLEL_GROUP", 2] == 8 and asked["EMBEDDING_GROUP", 2] == 8
    assert asked["TENSOR_MODEL_PARALLEL_GROUP", 2] is None
    assert {count for (_, num_ranks), count in asked.items() if num_ranks == 1} == {1}
    (default, asked), *_ = run_on_ranks(_channels, layout(2, {}).megatron, 2, timeout_s=60)
    assert asked["DATA_PARALLEL_GROUP", 2] is None and asked["DATA_PARALLEL_GROUP_WITH_CP", 2] is None
    ((default, asked),) = run_on_ranks(_channels, layout(1, {}).megatron, 1, timeout_s=60)
    assert default == 1 and asked == {}, "all of them are the default group"
