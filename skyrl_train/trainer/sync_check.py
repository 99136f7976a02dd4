"""Do engine and trainer agree about the same tokens after a weight sync?

Digests prove that the engine was handed the trainer's bytes. That it computes with them (the CPU build repacks
weights, and a model may be wired wrongly on either side) is seen by comparing the logprobs of fixed samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from skyrl_train.cluster.engine_group import EngineGroup
from skyrl_train.cluster.policy_group import PolicyGroup
from skyrl_train.types import Group, TrainBatch

NUM_SAMPLES = 8
# Mean |difference| in nats on equal weights: 4e-7 in float32 on the CPU; on a GPU vLLM's kernels compute float32 in
# TensorFloat-32, 5e-4. One optimizer step of the quickstart moves it by 1e-2.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
GPU_FLOAT32_BOUND = 3e-3


class SyncCheckFailed(RuntimeError):
    """An engine computes other logprobs than the trainer."""


class SyncCheck:
    """Compares logprobs at the first and at each Nth sync."""

    def __init__(self, every: int, dtype_name: str, *, on_gpu: bool) -> None:
        """`every` = 0 means never."""
        self._every = every
        self._bound = GPU_FLOAT32_BOUND if on_gpu and dtype_name == "float32" else BOUNDS[dtype_name]
        self._batch: TrainBatch | None = None
        self.last_difference: float | None = None

    def is_due(self, sync: int) -> bool:
        """Syncs count from 1."""
        return self._every > 0 and (sync == 1 or sync % self._every == 0)

    async def run(self, policy: PolicyGroup, engines: EngineGroup, groups: Sequence[Group]) -> None:
        """Compare on the samples of the first call.

        Raises: SyncCheckFailed with the difference, the bound and the engine.
        """
        if self._batch is None:
            self._batch = _batch_of(groups)
        batch = self._batch
        trained = await policy.logprobs(batch)
        bounds = batch.cu_seqlens.tolist()
        prompts = [batch.token_ids[start:end].tolist() for start, end in pairwise(bounds)]
        for index, logprobs in enumerate(await engines.prompt_logprobs(prompts)):
            served = torch.cat([torch.tensor(one, dtype=torch.float32) for one in logprobs])
            difference = float((served - trained).abs().mean())
            self.last_difference = max(difference, self.last_difference or 0.0) if index else difference
            if not difference <= self._bound:
                raise SyncCheckFailed(
                    f"after the sync of version {policy.policy_version} engine {index} computes logprobs that differ "
                    f"from the trainer's by {difference:.3g} nats in mean on {len(prompts)} fixed samples; at most "
                    f"{self._bound:g} is rounding. The engine does not hold the trained weights (or the model's code "
                    "differs); trainer.verify_sync_every=0 would hide this"
                )


def _batch_of(groups: Sequence[Group]) -> TrainBatch:
    """The first samples, one per group, as a batch of one micro-batch that trains nothing."""
    samples = [group.samples[0] for group in groups[:NUM_SAMPLES]]
    token_ids = torch.cat([sample.token_ids for sample in samples])
    lengths = torch.tensor([0] + [len(sample.token_ids) for sample in samples])
    num = len(samples)
    return TrainBatch(
        token_ids=token_ids,
        cu_seqlens=lengths.cumsum(0).int(),
        loss_mask=torch.zeros(len(token_ids), dtype=torch.bool),
        loss_weights=torch.zeros(len(token_ids)),
        rollout_logprobs=torch.zeros(len(token_ids)),
        advantages=torch.zeros(num),
        sample_ids=torch.arange(num),
        mini_batches=((tuple(range(num)),),),
    )
