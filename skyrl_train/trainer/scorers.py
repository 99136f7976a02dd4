"""Signals about every token of a step that models compute before the update."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from skyrl_train.algorithms.build import build_critic_objective
from skyrl_train.batching.hinted import aligned
from skyrl_train.batching.split import mini_batches_of, split
from skyrl_train.cluster.ranks.critic_group import CriticGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.scorer_group import ScorerGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.config import Config
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.trainer.from_config import max_lengths, micro_batch_limits
from skyrl_train.trainer.residency import Residency
from skyrl_train.types import ExperienceBatch, Metrics


@dataclass(frozen=True, slots=True)
class Signals:
    """Results of all scorers; the driver holds references, and tensors only where credit assignment reads them."""

    refs: Mapping[str, Sequence[Any]]
    """Signal of each scorer -> a reference to the values [T] of each shard, or of a teacher to several by field."""
    has_old_logprobs: bool
    """Whether the policy's ranks keep logprobs of the weights before the update."""
    fetched: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Name -> [T] of each shard: `kl`, the estimated KL divergence from the reference, with a KL penalty in the reward;
    `old_logprobs` and `old_entropy` for selections of tokens."""


class Engines(Protocol):
    """Engines of a teacher (`TeacherEngines`, `ServedTeacher`)."""

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Per prompt the logprob of each token at temperature 1; 0 for the first."""


class EngineScorer:
    """A teacher whose logprobs come from engines; it holds none of the devices of trainers."""

    is_teacher = True

    def __init__(self, name: str, engines: Engines, data_sources: Sequence[str] | None = None) -> None:
        """Args: name, data_sources: like those of `ScorerGroup`."""
        self.name = self.signal = name
        self.data_sources, self._engines = data_sources, engines

    async def score(self, shards: Shards) -> list[Any]:
        """References to the fields of each shard, like those of a teacher on ranks; 0 for samples of no micro-batch."""
        places = [
            (shard, slice(*batch.cu_seqlens[sample : sample + 2].tolist()))
            for shard, batch in enumerate(shards.batches)
            for mini_batch in batch.mini_batches
            for sample in itertools.chain(*mini_batch)
        ]
        prompts = [shards.batches[shard].token_ids[tokens].tolist() for shard, tokens in places]
        logprobs = [torch.zeros(len(batch.token_ids)) for batch in shards.batches]
        for (shard, tokens), values in zip(places, await self._engines.prompt_logprobs(prompts), strict=True):
            logprobs[shard][tokens] = torch.tensor(values, dtype=torch.float32)
        pairs = zip(logprobs, shards.batches, strict=True)
        return shards.put_each([aligned({"teacher_logprobs": values}, batch) for values, batch in pairs])


class Scorers:
    """Scores a step's shards with the reference and other frozen models, then with the policy."""

    def __init__(
        self,
        trainer: TrainerConfig,
        policy: PolicyGroup,
        scorers: Sequence[ScorerGroup | EngineScorer],
        residency: Residency,
        *,
        has_selections: bool = False,
    ) -> None:
        """Args: has_selections: whether the objective selects tokens by values of the policy before the step."""
        self._trainer, self._policy, self._scorers, self._residency = trainer, policy, scorers, residency
        self._has_selections = has_selections

    async def score(
        self, shards: Shards, data_sources: Sequence[str], hinted: Shards | None = None
    ) -> dict[str, Sequence[Any]]:
        """`Signals.refs` of all scorers.

        Args: data_sources: of each sample's prompt; hinted: the shards with the prompts that teachers read.
        Raises: ValueError for a sample that no teacher is for.
        """
        refs: dict[str, Sequence[Any]] = {}
        for scorer, is_chosen in self._assigned(data_sources):
            read = shards if hinted is None or not scorer.is_teacher else hinted
            if isinstance(scorer, ScorerGroup):
                await self._residency.for_scoring(scorer)
            refs[scorer.signal] = await scorer.score(read if is_chosen is None else read.only(is_chosen))
        return refs

    async def score_with_policy(self, shards: Shards, refs: Mapping[str, Sequence[Any]]) -> Signals:
        """Add what the policy computes. Args: refs: those of `score`. Returns with the policy on its devices."""
        await self._residency.for_training()
        ref_logprobs = refs.get("ref_logprobs") if self._trainer.algorithm.use_kl_in_reward else None
        if ref_logprobs is None and not self._has_selections and not self._needs_old_logprobs(shards):
            return Signals(refs, has_old_logprobs=False)
        fetched = await self._policy.keep_old_logprobs(shards, ref_logprobs)
        return Signals(refs, has_old_logprobs=True, fetched=fetched)

    def _assigned(self, data_sources: Sequence[str]) -> list[tuple[ScorerGroup | EngineScorer, list[bool] | None]]:
        """Scorers, without those that have no sample in this step, and which samples each scores; None for all."""
        of_source = {source: scorer for scorer in self._scorers for source in scorer.data_sources or ()}
        if not of_source:
            return [(scorer, None) for scorer in self._scorers]
        teacher = self._trainer.teacher.model
        missing = set(data_sources) - of_source.keys() - teacher.path_of_data_source.keys()
        if missing and teacher.path is None:
            raise ValueError(
                f"the data source {min(missing)} has no teacher. Add it to trainer.teacher.model.path_of_data_source, "
                "or set trainer.teacher.model.path, the teacher of all others"
            )
        default = next((scorer for scorer in self._scorers if scorer.is_teacher and scorer.data_sources is None), None)
        assigned: list[tuple[ScorerGroup | EngineScorer, list[bool] | None]] = []
        for scorer in self._scorers:
            if not scorer.is_teacher:
                assigned.append((scorer, None))
                continue
            is_chosen = [of_source.get(source, default) is scorer for source in data_sources]
            if any(is_chosen):
                assigned.append((scorer, is_chosen))
        return assigned

    def _needs_old_logprobs(self, shards: Shards) -> bool:
        """With one mini-batch and one epoch the update's own forward pass gives them, unless dropout makes it another
        model than the one that sampled; with loglinear every pass does.
        """
        if self._trainer.algorithm.prox_logp_method == "loglinear":
            return False
        one_step = self._trainer.update_epochs_per_batch == 1 and len(shards.batches[0].mini_batches) == 1
        lora = self._trainer.policy.model.lora
        return not one_step or (lora.rank > 0 and lora.dropout > 0)


class Critic:
    """The critic with its own split of each step, because its layout and mini-batches may differ from the policy's."""

    def __init__(self, config: Config, model: PretrainedConfig, group: CriticGroup, residency: Residency) -> None:
        """Args: model: the policy's."""
        trainer = config.trainer
        self.group, self._residency, self._max_lengths = group, residency, max_lengths(config.generator)
        self._epochs, self._mini_batch_size = trainer.update_epochs_per_batch, trainer.critic_mini_batch_size
        self._reductions = build_critic_objective(trainer.algorithm.values).reductions
        self._limits = micro_batch_limits(trainer, model, group.dp_size, trainer.critic.megatron_config)
        self._scorer = critic_scorer(group)
        self._shards: Shards | None = None

    async def values(self, batch: ExperienceBatch, num_groups: int, step_id: int) -> Tensor:
        """Value of the state before every token, [T]; the ranks keep them too."""
        shards = self._shards = Shards(
            split(
                batch,
                self._limits,
                num_mini_batches=mini_batches_of(num_groups, self._mini_batch_size, "trainer.critic_mini_batch_size"),
                reductions=self._reductions,
                max_lengths=self._max_lengths,
                step_id=step_id,
            )
        )
        await self.load()
        return shards.merged(await self.group.values(shards), batch)

    async def update(self, batch: ExperienceBatch, returns: Tensor) -> Metrics:
        """Train on the samples of the last `values`. Args: returns [T]."""
        assert self._shards is not None
        await self.load()
        return await self.group.update(self._shards, self._shards.put(returns, batch), self._epochs)

    async def load(self) -> None:
        """Put the critic on its devices."""
        await self._residency.for_scoring(self._scorer)


def critic_scorer(group: CriticGroup) -> ScorerGroup:
    """The critic as residency and memory report see it."""
    return ScorerGroup("critic", "values", group, "values")
