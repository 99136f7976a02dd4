"""Signals about every token of a step that models compute before the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.scorer_group import ScorerGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.trainer.residency import Residency


@dataclass(frozen=True, slots=True)
class Signals:
    """Results of all scorers; the driver holds references, and tensors only where credit assignment reads them."""

    refs: Mapping[str, Sequence[Any]]
    """Field of TokenInputs -> a reference to the values [T] of each shard."""
    has_old_logprobs: bool
    """Whether the policy's ranks keep logprobs of the weights before the update."""
    fetched: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Name -> [T] of each shard: `kl`, the estimated KL divergence from the reference, with a KL penalty in the reward;
    `old_logprobs` and `old_entropy` for selections of tokens."""


class Scorers:
    """Scores a step's shards with the reference and other frozen models, then with the policy."""

    def __init__(
        self,
        trainer: TrainerConfig,
        policy: PolicyGroup,
        scorers: Sequence[ScorerGroup],
        residency: Residency,
        *,
        has_selections: bool = False,
    ) -> None:
        """Args: has_selections: whether the objective selects tokens by values of the policy before the step."""
        self._trainer, self._policy, self._scorers, self._residency = trainer, policy, scorers, residency
        self._has_selections = has_selections

    async def score(self, shards: Shards) -> Signals:
        """Returns with the policy on its devices."""
        refs = {}
        for scorer in self._scorers:
            await self._residency.for_scoring(scorer)
            refs[scorer.signal] = await scorer.score(shards)
        await self._residency.for_training()
        ref_logprobs = refs.get("ref_logprobs") if self._trainer.algorithm.use_kl_in_reward else None
        if ref_logprobs is None and not self._has_selections and not self._needs_old_logprobs(shards):
            return Signals(refs, has_old_logprobs=False)
        fetched = await self._policy.keep_old_logprobs(shards, ref_logprobs)
        return Signals(refs, has_old_logprobs=True, fetched=fetched)

    def _needs_old_logprobs(self, shards: Shards) -> bool:
        """With one mini-batch and one epoch the update's own forward pass gives them, unless dropout makes it another
        model than the one that sampled."""
        one_step = self._trainer.update_epochs_per_batch == 1 and len(shards.batches[0].mini_batches) == 1
        lora = self._trainer.policy.model.lora
        return not one_step or (lora.rank > 0 and lora.dropout > 0)
