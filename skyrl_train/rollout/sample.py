"""One environment and one `generate` callable -> one Sample. Token ids in, token ids out: text is tokenised once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.env_pool import CallTimeout, EnvPool
from skyrl_train.rollout.episode import Episode
from skyrl_train.types import Generate, Generation, Message, Prompt, Sample, SamplingParams

_T = TypeVar("_T")


class GenerationAborted(RuntimeError):
    """An engine gave up a generation; its sample would be cut off at an arbitrary token."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What all samples of a run have in common."""

    max_turns: int
    """Most generations of one sample."""
    max_input_length: int
    """Tokens before a turn; a longer conversation ends."""
    env_kwargs: Mapping[str, Mapping[str, Any]]
    """env_class -> what its environments get as `env_config`; nothing for a class that is not listed."""


class Sampler:
    """Plays episodes; all that it holds is shared by the samples in flight."""

    def __init__(self, *, generate: Generate, chat: ChatTemplate, env_pool: EnvPool, settings: RolloutSettings) -> None:
        self._generate = generate
        self._chat = chat
        self._env_pool = env_pool
        self._settings = settings
        self._env_configs = {name: _env_config(kwargs) for name, kwargs in settings.env_kwargs.items()}
        self._empty_env_config = _env_config({})

    async def sample(self, prompt: Prompt, sampling_params: SamplingParams) -> Sample:
        """Plays one episode: until the environment is done, `max_turns` generations, or the conversation outgrows
        `max_input_length` (stop_reason "length"; a prompt that is too long to begin with is a sample without
        generation, of reward 0 and version 0).

        What an environment says after the last generation is not part of the sample.
        Raises: EnvironmentFailure; GenerationAborted; whatever `generate` raises. The environment is closed, unless
            a thread hangs in it.
        """
        env_config = self._env_configs.get(prompt.env_class, self._empty_env_config)
        episode = Episode(prompt, env_config=env_config, max_turns=self._settings.max_turns)
        try:
            return await self._play(prompt, episode, sampling_params)
        except BaseException as error:
            if not isinstance(error.__cause__, CallTimeout):
                self._env_pool.submit(episode.abandon)
            raise

    async def _play(self, prompt: Prompt, episode: Episode, sampling_params: SamplingParams) -> Sample:
        messages = await self._on_env_thread(episode, episode.start)
        trace = _Trace(given=messages, given_ids=_rendered(episode, lambda: self._chat.prompt_ids(messages)))
        while True:
            input_ids = trace.input_ids()
            if len(input_ids) > self._settings.max_input_length:
                trace.stop_reason = "length"
                await self._on_env_thread(episode, episode.finish)
                return trace.to_sample(episode.metrics)
            generation = await self._generate(input_ids, sampling_params, prompt.uid)
            if generation.stop_reason == "abort":
                raise GenerationAborted(f"the engine aborted turn {trace.turns + 1} of a sample of prompt {prompt.uid}")
            trace.add(generation)
            last = trace.turns == self._settings.max_turns
            outcome = await self._on_env_thread(episode, partial(episode.step, generation.text, last=last))
            trace.reward += outcome.reward
            if outcome.done or last:
                return trace.to_sample(episode.metrics)
            trace.given = outcome.observations
            reply_ids = partial(self._chat.reply_ids, generation.token_ids, outcome.observations)
            trace.given_ids = _rendered(episode, reply_ids)

    async def _on_env_thread(self, episode: Episode, function: Callable[[], _T]) -> _T:
        try:
            return await self._env_pool.submit(function)
        except CallTimeout as error:
            raise episode.failure(f"{error} (environment.step_timeout_s)") from error


@dataclass(slots=True)
class _Trace:
    """The conversation so far."""

    given: list[Message]
    """Messages that the policy has not answered yet: the prompt, later the environment's reply."""
    given_ids: list[int]
    """Their tokens, up to where the policy speaks."""
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    prompt_length: int = 0
    reward: float = 0.0
    stop_reason: str = "length"
    turns: int = 0
    policy_version: int = 0

    def input_ids(self) -> list[int]:
        """[L] what the policy reads before its next turn."""
        return self.token_ids + self.given_ids

    def add(self, generation: Generation) -> None:
        """The given messages and the policy's answer to them."""
        assert len(generation.token_ids) == len(generation.logprobs), "an engine returns one logprob per token"
        first = self.turns == 0
        self._take_given()
        self.token_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.transcript.append({"role": "assistant", "content": generation.text})
        self.turns += 1
        self.stop_reason = generation.stop_reason
        self.policy_version = (
            generation.policy_version if first else min(self.policy_version, generation.policy_version)
        )

    def to_sample(self, env_metrics: Mapping[str, Any]) -> Sample:
        if self.turns == 0:
            self._take_given()
        return Sample(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            loss_mask=torch.tensor(self.loss_mask, dtype=torch.bool),
            rollout_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            prompt_length=self.prompt_length,
            reward=self.reward,
            stop_reason=self.stop_reason,
            turns=self.turns,
            policy_version=self.policy_version,
            env_metrics=dict(env_metrics),
            transcript=self.transcript,
        )

    def _take_given(self) -> None:
        if self.turns == 0:
            self.prompt_length = len(self.given_ids)
        self.token_ids += self.given_ids
        self.loss_mask += [False] * len(self.given_ids)
        self.logprobs += [0.0] * len(self.given_ids)
        self.transcript += self.given


def _rendered(episode: Episode, render: Callable[[], list[int]]) -> list[int]:
    try:
        return render()
    except ValueError as error:
        raise episode.failure(f"its messages cannot be shown to the policy: {error}") from error


def _env_config(kwargs: Mapping[str, Any]) -> DictConfig:
    """Fields are read as attributes or keys, as skyrl-gym's environments do; read-only, for all samples share it."""
    config = OmegaConf.create(dict(kwargs))
    OmegaConf.set_readonly(config, True)
    return config
