"""The nouns of one training step, in the order in which they come to be.

    Prompt -> Sample x G -> Group -> ExperienceBatch -> TrainBatch (one per data-parallel rank)
    Example (supervised fine-tuning) -> ExperienceBatch -> the same

A rank packs its TrainBatch into micro-batches (megatron/passes/packing.py).

Shapes: L tokens of one sample, T tokens of many samples end to end (no padding), B samples, G samples of one group.
`cu_seqlens [B + 1]` holds the bounds of the samples in a `[T]` tensor. Every `[T]` tensor is aligned to `token_ids`:
entry t speaks of token t itself (its logprob is the logprob of drawing token t given the tokens before it).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Message = dict[str, str]
Metrics = dict[str, float]
UNKNOWN_VERSION = -1
"""Policy version of a sample whose tokens or logprobs cannot be attributed to one."""
VersionSpans = tuple[tuple[int, int], ...]
"""(policy version, number of tokens that it drew), in the order of the tokens."""


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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the engine draws tokens. The names are those of `generator.sampling_params`."""

    max_generate_length: int
    """Most tokens of one generation (one turn)."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a generation; they stay part of its text and tokens."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine returns for one prompt of token ids."""

    token_ids: list[int]
    """[L] drawn tokens, the end-of-sequence token included where it was drawn."""
    logprobs: list[float]
    """[L] of each drawn token under the distribution it was drawn from (temperature, top-p, top-k applied)."""
    text: str
    """The drawn tokens decoded, special tokens left out."""
    stop_reason: str
    """"stop" (end of sequence or stop string), "length" or "abort"."""
    policy_version: int
    """Lowest version of the weights that drew a token of it."""
    version_spans: VersionSpans = ()
    """The versions of all tokens, where an update of the weights let the generation run on; empty where the engine
    does not tell, and for one version."""


Generate = Callable[[list[int], SamplingParams, str], Awaitable[Generation]]
"""`await generate(prompt_token_ids, sampling_params, route_key)`; calls with one route_key reach one engine."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to a prompt (all its turns) with its reward."""

    token_ids: Tensor
    """[L] int64: prompt, then the policy's tokens and the environment's replies in order."""
    loss_mask: Tensor
    """[L] bool: the policy wrote this token."""
    rollout_logprobs: Tensor
    """[L] float32: the engine's logprob where loss_mask, 0 elsewhere."""
    prompt_length: int
    reward: float
    """Sum of the rewards of all turns."""
    stop_reason: str
    """"stop" or "length": that of the last generation, or "length" where the conversation became too long."""
    turns: int
    policy_version: int
    """Lowest version that wrote a token of it, or UNKNOWN_VERSION."""
    env_metrics: dict[str, Any] = field(default_factory=dict)
    transcript: list[Message] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    """[G]"""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of supervised fine-tuning."""

    token_ids: Tensor
    """[L] int64"""
    loss_mask: Tensor
    """[L] bool: the token is trained. Never the first, which nothing predicts."""


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """All samples of a step end to end, as the engines and environments made them."""

    token_ids: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B + 1] int32, first 0, last T."""
    loss_mask: Tensor
    """[T] bool"""
    rollout_logprobs: Tensor
    """[T] float32"""
    rewards: Tensor
    """[B] float32"""
    advantages: Tensor
    """[B] float32"""
    group_ids: Tensor
    """[B] int64, samples of one prompt are neighbours and share it."""

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int32"""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one data-parallel rank computes on in one step: its samples, end to end, and how they are cut."""

    token_ids: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B + 1] int32"""
    loss_mask: Tensor
    """[T] bool"""
    loss_weights: Tensor
    """[T] float32: share of each token in its mini-batch's loss, 0 where not loss_mask; they are made from the whole
    mini-batch, so a sum of `term * loss_weights` over all ranks and micro-batches is the loss."""
    rollout_logprobs: Tensor
    """[T] float32"""
    advantages: Tensor
    """[B] float32"""
    sample_ids: Tensor
    """[B] int64: index of each sample in the ExperienceBatch."""
    mini_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """mini_batches[m][k] = indices (into this batch) of the samples of micro-batch k of mini-batch m. Every rank has
    the same number of micro-batches in mini-batch m; an empty tuple is a micro-batch without samples."""
