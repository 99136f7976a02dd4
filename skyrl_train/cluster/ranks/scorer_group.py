"""Models that score a step's shards, such as the reference of the KL term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards


class FrozenGroup(ModelGroup):
    """The ranks of a model that is not trained."""

    entry_point = "skyrl_train.megatron.scorer:MegatronScorer"


class ScorerGroup:
    """Computes one signal for every token of a step's shards; the results stay on the ranks."""

    def __init__(
        self,
        name: str,
        signal: str,
        model: ModelGroup,
        method: str,
        data_sources: Sequence[str] | None = None,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Args: name: in metrics and logs; signal: its field in TokenInputs; method: of the ranks' worker;
        data_sources: of the prompts whose samples it scores, None for all that no other scorer of its method names;
        arguments: further ones of the method.
        """
        self.name, self.signal, self.model, self.data_sources = name, signal, model, data_sources
        self._method, self._arguments = method, arguments

    @property
    def is_teacher(self) -> bool:
        """Whether the policy learns from the signal."""
        return self.signal.startswith("teacher")

    @property
    def is_policy(self) -> bool:
        """Whether the policy's own ranks compute the signal."""
        return isinstance(self.model, PolicyGroup)

    async def score(self, shards: Shards) -> list[Any]:
        """References to the signal [T] of each shard. Shards are assigned to the data-parallel ranks round-robin."""
        ranks = self.model.ranks
        scored: list[Any] = []
        for start in range(0, len(shards.refs), ranks[0].dp_size):
            wave = shards.refs[start : start + ranks[0].dp_size]
            # All ranks run when any does: a rank without a shard repeats one, since its expert peers may need it.
            args = [(wave[min(rank.dp_rank, len(wave) - 1)], *self._arguments) for rank in ranks]
            results = await self.model.group.each_kept(self._method, args)
            reporting = {rank.dp_rank: result for rank, result in zip(ranks, results, strict=True) if rank.reports}
            scored += [reporting[index] for index in range(len(wave))]
        return scored


def base_model_scorer(policy: PolicyGroup) -> ScorerGroup:
    """The reference of the KL term of a policy with adapters: the policy with these off."""
    return ScorerGroup("reference", "ref_logprobs", policy, "reference_logprobs")


def own_teacher_scorer(
    policy: PolicyGroup, topk: int, name: str = "teacher", data_sources: Sequence[str] | None = None, *, is_base: bool
) -> ScorerGroup:
    """The policy as its own teacher. Args: topk: number of likeliest tokens that it reports; is_base: with its adapters
    off.
    """
    return ScorerGroup(name, name, policy, "teacher_logprobs", data_sources, (topk, is_base))
