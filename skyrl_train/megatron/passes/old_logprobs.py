"""Logprobs that a rank keeps between their own pass over a step's samples and the update that compares with them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from skyrl_train.types import TrainBatch


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """Logprobs of a step's samples, and what their values depend on: the step and the weights."""

    step_id: int
    policy_version: int
    values: Tensor | None
    """[T] float32; None on a pipeline stage without the output layer."""


def old_logprobs(
    kept: OldLogprobs | None, batch: TrainBatch, policy_version: int, num_optimizer_steps: int
) -> Tensor | None:
    """Return the kept logprobs of an update, [T] float32.

    None means that the update's own forward pass yields them: always on a stage without the output layer, and for an
    update of one optimizer step, which computes under the weights before the update anyway.

    Raises: RuntimeError if an update of several optimizer steps finds none of its step and weights. The first step
        changes the weights, so the later ones would be compared with a policy that is not the old one.
    """
    if kept is not None and (kept.step_id, kept.policy_version) == (batch.step_id, policy_version):
        return kept.values
    if num_optimizer_steps == 1:
        return None
    found = (
        "none are kept"
        if kept is None
        else f"the kept ones are of step {kept.step_id} and version {kept.policy_version}"
    )
    raise RuntimeError(
        f"an update of {num_optimizer_steps} optimizer steps needs the old logprobs of step {batch.step_id} under "
        f"policy version {policy_version}, and {found}. Compute them with keep_old_logprobs(batch) right before "
        "update(batch)"
    )
