"""Data types of a training step, in the order in which they are made.

    Prompt -> Sample x G -> Group -> ExperienceBatch -> TrainBatch (one per data-parallel rank)
    Example (supervised fine-tuning) -> TokenBatch -> TrainBatch

A rank packs its TrainBatch into micro-batches (megatron/passes/packing.py).

Shapes: L tokens of one sample, T tokens of many samples end to end (no padding), B samples, G samples of one group;
in `algorithms/` also P, the predicting positions of one packed micro-batch on one rank.
`cu_seqlens [B + 1]` holds the bounds of the samples in a `[T]` tensor. Every `[T]` tensor is aligned to `token_ids`:
entry t belongs to token t (its logprob is that of sampling token t given the tokens before it).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Message = dict[str, Any]
"""A chat message: `role` and `content`; `tool_calls` and other fields that the chat template reads."""
Metrics = dict[str, float]
UNKNOWN_VERSION = -1
"""Policy version of a sample whose tokens or logprobs cannot be attributed to one."""
VersionSpans = tuple[tuple[int, int], ...]
"""(policy version, number of tokens that it sampled), in the order of the tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set."""

    uid: str
    """Stable name of the row, `str(row index)`."""
    messages: list[Message]
    """Chat messages as the environment's `init` receives them."""
    env_class: str
    """Name in skyrl-gym's registry, or `module:Class`."""
    extras: dict[str, Any]
    """Every other column of the row (`reward_spec`, `extra_info`, ...)."""
    data_source: str
    """Label under which evaluation scores are grouped."""
    location: object = field(default="", compare=False, repr=False)
    """File of the row and its line there, as text; empty if unknown."""

    @property
    def name(self) -> str:
        """Uid, and the location if it is known, for errors."""
        location = str(self.location)
        return f"prompt {self.uid}" + (f" from {location}" if location else "")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of an engine, named as in `generator.sampling_params`."""

    max_generate_length: int
    """Maximum tokens of one generation (one turn)."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a generation; they stay part of its text and tokens."""
    seed: int | None = None
    """Makes the tokens independent of the engine's other requests; None: they depend on how requests are batched."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Answer of an engine to one prompt of token ids."""

    token_ids: list[int]
    """[L] sampled tokens, including the end-of-sequence token if it was sampled."""
    logprobs: list[float]
    """[L] logprob of each token under the distribution it was sampled from (temperature and truncation applied)."""
    text: str
    """The tokens decoded, without special tokens."""
    stop_reason: str
    """"stop" (end of sequence or stop string), "length" or "abort"; a rollout rejects aborted generations."""
    policy_version: int
    """Lowest version of the weights that sampled one of the tokens."""
    version_spans: VersionSpans = ()
    """Versions of all tokens, in order; empty if the engine reports only `policy_version`."""


Generate = Callable[[list[int], SamplingParams, str], Awaitable[Generation]]
"""`await generate(prompt_token_ids, sampling_params, route_key)`; calls with one route_key reach one engine."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to a prompt (all its turns, or one of them) with its rewards."""

    token_ids: Tensor
    """[L] int64: prompt, then the policy's tokens and the environment's replies in order."""
    loss_mask: Tensor
    """[L] bool: the policy wrote this token."""
    rollout_logprobs: Tensor
    """[L] float32: the engine's logprob where loss_mask, 0 elsewhere."""
    prompt_length: int
    """Tokens of the prompt with its chat template."""
    rewards: Tensor
    """[L] float64: each reward on the token that earned it, such as the last of a turn; 0 elsewhere. float64 makes the
    advantages of equal rewards exactly 0."""
    stop_reason: str
    """"stop" or "length": that of the last generation, or "length" where the conversation became too long."""
    turns: int
    policy_version: int
    """Lowest version that wrote a token of it, or UNKNOWN_VERSION."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    transcript: list[Message] = field(default_factory=list)
    version_spans: VersionSpans = ()
    """Versions of all tokens that the policy wrote, in order; empty if unknown."""
    named_rewards: dict[str, float] = field(default_factory=dict)
    """Several rewards by their names, for `gdpo`; `rewards` are those of all other estimators."""
    ends_conversation: bool = True
    """False: the next sample of the group is a later turn of the same conversation, and shares its credit."""

    @property
    def reward(self) -> float:
        """Sum of all rewards."""
        return float(self.rewards.sum())

    @property
    def known_spans(self) -> VersionSpans:
        """`version_spans`; without them, all tokens as of `policy_version`, if that is known."""
        if self.version_spans or self.policy_version == UNKNOWN_VERSION:
            return self.version_spans
        return ((self.policy_version, int(self.loss_mask.sum())),)

    @property
    def num_written(self) -> int:
        """Tokens that the policy wrote. A masked sample has them in its spans; without these, all after its prompt."""
        written = int(self.loss_mask.sum()) or sum(count for _, count in self.version_spans)
        return written or len(self.token_ids) - self.prompt_length


def final_reward(length: int, reward: float) -> Tensor:
    """Rewards [L] of a sample whose last token earns everything."""
    rewards = torch.zeros(length, dtype=torch.float64)
    rewards[-1] = reward
    return rewards


def conversations(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one prompt by conversation, in order."""
    found: list[list[Sample]] = [[]]
    for sample in samples:
        found[-1].append(sample)
        if sample.ends_conversation:
            found.append([])
    return found if found[-1] else found[:-1]


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """[G]"""
    greedy: tuple[Sample, ...] = ()
    """Those of a rollout with greedy responses, for estimators that compare with it; they are not trained."""

    @property
    def conversations(self) -> list[list[Sample]]:
        """The samples by conversation, in order: estimators, filters and metrics count these."""
        return conversations(self.samples)

    @property
    def rewards(self) -> list[float]:
        """Sum of all rewards of each conversation."""
        return [sum(sample.reward for sample in samples) for samples in self.conversations]

    @property
    def greedy_reward(self) -> float:
        """Mean of the rewards of the greedy conversations: one, unless a rollout makes several."""
        rewards = [sum(sample.reward for sample in samples) for samples in conversations(self.greedy)]
        return sum(rewards) / len(rewards)


@dataclass(frozen=True, slots=True)
class TeacherPrompt:
    """Prompt with which a teacher scores a sample, in place of the sample's own."""

    length: int
    """Tokens of the sample's own prompt."""
    token_ids: Tensor
    """[L] int64"""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of supervised fine-tuning."""

    token_ids: Tensor
    """[L] int64"""
    loss_mask: Tensor
    """[L] bool: the token is trained. Never the first, which nothing predicts."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Samples or examples end to end; all that supervised fine-tuning needs."""

    token_ids: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B + 1] int32, first 0, last T."""
    loss_mask: Tensor
    """[T] bool"""
    group_ids: Tensor
    """[B] int64, samples of one prompt are neighbours and share it."""

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int32"""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def signals(self) -> dict[str, Tensor]:
        """Values per token, [T] each, that ranks receive beside ids, mask and weights."""
        return {}


@dataclass(frozen=True, slots=True)
class ExperienceBatch(TokenBatch):
    """All samples of a step end to end, as the engines and environments made them."""

    rollout_logprobs: Tensor
    """[T] float32"""
    staleness: Tensor
    """[T] int32: policy versions between sampling and now; -1 where unknown or the policy did not write the token."""
    rewards: Tensor
    """[T] float64"""
    named_rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [B] float64"""
    baselines: Tensor | None = None
    """[B] float64: the greedy response's reward, if every group has one."""
    ends_conversation: Tensor | None = None
    """[B] bool, `Sample.ends_conversation`; None if every sample is a conversation."""

    @property
    def signals(self) -> dict[str, Tensor]:
        """Rollout logprobs and staleness."""
        return {"rollout_logprobs": self.rollout_logprobs, "staleness": self.staleness}


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one data-parallel rank computes on in one step: its samples, end to end, and how they are split."""

    token_ids: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B + 1] int32"""
    loss_mask: Tensor
    """[T] bool"""
    loss_weights: Mapping[str, Tensor]
    """Name of each reduction of the objective -> [T] float32: share of each token in its mini-batch's loss, 0 where not
    loss_mask; they are made from the whole mini-batch, so a sum of `term * loss_weights` over all ranks and
    micro-batches is the loss."""
    signals: Mapping[str, Tensor]
    """`TokenBatch.signals` of these samples."""
    sample_ids: Tensor
    """[B] int64: index of each sample in the step's batch."""
    mini_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """mini_batches[m][k] = indices (into this batch) of the samples of micro-batch k of mini-batch m. Every rank has
    the same number of micro-batches in mini-batch m; an empty tuple is a micro-batch without samples."""
    step_id: int = 0
    """The step that it belongs to; logprobs that ranks keep are of one step."""
