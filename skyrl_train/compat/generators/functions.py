"""Functions that generators of skyrl_train 0.4 call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_train.compat.generators.types import ConversationType
from skyrl_train.envs.registry import aggregate_env_metrics
from skyrl_train.rollout.metrics import length_metrics

BEFORE = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
"""Conversation before the messages that are tokenised, so that the template adds nothing in front of them."""


def get_rollout_metrics(
    responses: Sequence[Sequence[int]],
    rewards: Sequence[float] | Sequence[Sequence[float]],
    env_metrics: Sequence[Mapping[str, Any]] | None = None,
    env_classes: Sequence[str] | None = None,
) -> dict[str, float]:
    """Lengths of responses, and the metrics of their environments."""
    lengths = np.array([len(response) for response in responses])
    metrics = length_metrics(lengths, np.array([float(np.sum(reward)) for reward in rewards]))
    for env_class in dict.fromkeys(env_classes or ()):
        pairs = zip(env_classes or (), env_metrics or (), strict=True)
        own = [each for name, each in pairs if name == env_class and each]
        for name, value in (aggregate_env_metrics(env_class, own) if own else {}).items():
            metrics[f"environment/{name}"] = value
    return metrics


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType,
    tokenizer: Any,
    assistant_logprobs: Sequence[Sequence[float]] | None = None,
    chat_template: str | None = None,
) -> tuple[list[int], list[int], list[float] | None]:
    """Token ids, loss mask and logprobs of messages after a prompt. Text is tokenised again, so that the ids may differ
    from those that were sampled. Args: chat_template: instead of the tokenizer's.

    Raises: ValueError if an assistant's message has another number of tokens than logprobs.
    """
    from skyrl_train.data.chat import ChatTemplate  # and transformers, which a program that starts Ray does not need

    chat = ChatTemplate(tokenizer, {} if chat_template is None else {"chat_template": chat_template})
    start = chat.render(BEFORE, add_generation_prompt=False)
    header = chat.encode(chat.render(BEFORE)[len(start) :])
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    given = iter(assistant_logprobs or ())
    for message in messages:
        own = chat.encode(chat.render([*BEFORE, message], add_generation_prompt=False)[len(start) :])
        written = [0] * len(own)
        if message["role"] == "assistant":
            first = len(header) if own[: len(header)] == header else 0
            eos = tokenizer.eos_token_id
            end = len(own) - own[::-1].index(eos) if eos in own else len(own)
            written[first:end] = [1] * (end - first)
        ids, mask = [*ids, *own], [*mask, *written]
        if assistant_logprobs is not None:
            known = list(next(given)) if any(written) else []
            if len(known) != sum(written):
                raise ValueError(f"a message has {sum(written)} tokens and {len(known)} logprobs: they must be equal")
            numbers = iter(known)
            logprobs += [next(numbers) if each else 0.0 for each in written]
    return ids, mask, None if assistant_logprobs is None else logprobs


def get_sampling_params_for_backend(backend: str, sampling_params: Any) -> dict[str, Any]:
    """Sampling parameters of the configuration in vLLM's words. Raises: ValueError for another backend."""
    if backend != "vllm":
        raise ValueError(f"backend is {backend}: requests are vLLM's. Use vllm")
    given: dict[str, Any] = dict(sampling_params)
    names = {"max_generate_length": "max_tokens"}
    fixed = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True}
    return {names.get(name, name): list(value) if name == "stop" else value for name, value in given.items()} | fixed
