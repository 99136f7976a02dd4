"""A `generate` that reads its answers from a script, and what is needed to play an episode with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

import skyrl_train.envs  # noqa: F401 (registers the built-in environments)
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.collect import Collector
from skyrl_train.rollout.contract import Engines, Rollout
from skyrl_train.rollout.dialogue import ChatDialogue
from skyrl_train.rollout.env_pool import EnvPool
from skyrl_train.rollout.sample import Sampler
from skyrl_train.types import Generation, Prompt, Sample, SamplingParams

PARAMS = SamplingParams(max_generate_length=8)


class Script:
    """Answers with the texts in turn, per conversation; special tokens may be written out ("85<eos>")."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.inputs: list[list[int]] = []
        self.route_keys: list[str] = []
        self.stop_reason = "stop"
        self.versions: Iterator[int] = iter([])

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        await asyncio.sleep(0)
        text = self.texts[len(self.inputs) % len(self.texts)]
        self.inputs.append(token_ids)
        self.route_keys.append(route_key)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Generation(
            token_ids=ids,
            logprobs=[-0.5 - i for i in range(len(ids))],
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            stop_reason=self.stop_reason,
            policy_version=next(self.versions, 0),
        )


class NeverAnswers:
    """Records which calls wait and which were cancelled."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []

    async def __call__(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        self.asked.append(route_key)
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled.append(route_key)
            raise

    async def until_asked(self, times: int) -> None:
        while len(self.asked) < times:
            await asyncio.sleep(0.01)


def prompt(
    env_class: str, content: str = "guess:", ground_truth: object = "7", uid: str = "0", **extras: object
) -> Prompt:
    columns = {"reward_spec": {"ground_truth": ground_truth}, **extras}
    return Prompt(uid, [{"role": "user", "content": content}], env_class, columns, "unknown")


class Playing:
    """The default rollout with its engines."""

    def __init__(self, rollout: Rollout, engines: Engines) -> None:
        self._rollout, self._engines = rollout, engines
        self.collector = Collector(rollout, engines)

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Sample:
        (made,) = await self.samples(prompt, params)
        return made

    async def samples(self, prompt: Prompt, params: SamplingParams) -> list[Sample]:
        made = await self._rollout(prompt, params, self._engines.for_a_rollout(prompt))
        assert isinstance(made, list)
        return made


@contextmanager
def sampler(
    tokenizer: PreTrainedTokenizerBase,
    generate: Callable[..., Any],
    *,
    max_turns: int = 2,
    max_input_length: int = 1000,
    timeout_s: float = 5.0,
    env_kwargs: dict[str, dict[str, object]] | None = None,
    chat_template_kwargs: dict[str, object] | None = None,
    extra: dict[str, object] | None = None,
    dialogue: Callable[[ChatTemplate], ChatDialogue] = ChatDialogue,
) -> Iterator[Playing]:
    pool = EnvPool(max_workers=4, timeout_s=timeout_s)
    chat = ChatTemplate(tokenizer, chat_template_kwargs or {})
    engines = Engines(generate, tokenizer, chat, max_input_length=max_input_length, max_turns=max_turns)
    try:
        yield Playing(Sampler(pool, env_kwargs or {}, extra, dialogue).sample, engines)
    finally:
        pool.close(timeout_s=5.0)
