"""Messages between pipeline stages without shape messages.

Micro-batches differ in length, so Megatron sends the shape of each message ahead of it, and the host waits for it
before it can launch more kernels (p2p_communication.py of megatron-core 0.16 and 0.19). But all stages pack the same
samples: each knows how many tokens the next message has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from skyrl_train.megatron.passes.packing import MicroBatch

GROUPS = ["tp", "pp", "cp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]
"""Groups that Megatron's schedules read if they are given a communicator."""


class StageMessages(P2PCommunicator):
    """Megatron's communicator between stages, for one pass over `micro_batches` in `num_chunks` chunks of a rank.

    Activations arrive in the order in which the stage computes them, and gradients likewise, whatever the schedule.
    """

    def __init__(self, config: Any, micro_batches: Sequence[MicroBatch], num_chunks: int) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(pp_group=group, config=config)
        ranks = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        shapes = [[batch.token_ids.shape[1] // ranks, 1, config.hidden_size] for batch in micro_batches]
        table = get_schedule_table(len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage)

        def incoming(is_end: bool) -> Iterator[list[int]]:
            # The first chunk of the first stage receives no activations, the last of the last stage no gradient: one
            # chunk per round over the chunks, with the same micro-batches in every round.
            return iter([shapes[number] for number, chunk in table if chunk > 0 or not is_end])

        self._activations = incoming(is_end=group.rank() == 0)
        self._gradients = incoming(is_end=group.rank() == group.size() - 1)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Shapes received from the previous and the next stage; Megatron reads those that it requested."""
        return next(self._activations) if recv_prev else [], next(self._gradients) if recv_next else []


def between_stages(config: Any, micro_batches: Sequence[MicroBatch], num_chunks: int) -> dict[str, Any]:
    """Arguments of Megatron's schedules, which need the groups too if they are given a communicator."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {}
    return {
        "p2p_communicator": StageMessages(config, micro_batches, num_chunks),
        "pg_collection": ProcessGroupCollection.use_mpu_process_groups(GROUPS),
    }


def forget_messages(chunks: Sequence[Any]) -> None:
    """Free the last message of the previous stage, which Megatron's chunks keep with its gradient after a pass."""
    for chunk in chunks:
        get_attr_wrapped_model(chunk, "set_input_tensor")(None)
