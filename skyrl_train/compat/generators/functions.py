"""Functions that generators of skyrl_train 0.4 call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_train.compat.generators.types import (
    BatchMetadata,
    ConversationType,
    GeneratorInput,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryID,
)
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.envs.registry import aggregate_env_metrics

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
    totals = np.array([float(np.sum(reward)) for reward in rewards])

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if len(values) else 0.0

    metrics = {f"generate/{name}_num_tokens": float(getattr(lengths, name)()) for name in ("min", "max", "mean", "std")}
    metrics["generate/avg_num_tokens"] = metrics.pop("generate/mean_num_tokens")
    metrics["generate/avg_tokens_non_zero_rewards"] = mean(lengths[totals > 0])
    metrics["generate/avg_tokens_zero_rewards"] = mean(lengths[totals == 0])
    for env_class in dict.fromkeys(env_classes or ()):
        pairs = zip(env_classes or (), env_metrics or (), strict=True)
        own = [each for name, each in pairs if name == env_class and each]
        for name, value in (aggregate_env_metrics(env_class, own) if own else {}).items():
            metrics[f"environment/{name}"] = value
    return metrics


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType, tokenizer: Any, assistant_logprobs: Sequence[Sequence[float]] | None = None
) -> tuple[list[int], list[int], list[float] | None]:
    """Token ids, loss mask and logprobs of messages after a prompt. Text is tokenised again, so that the ids may differ
    from those that were sampled.

    Raises: ValueError if an assistant's message has another number of tokens than logprobs.
    """
    chat = ChatTemplate(tokenizer, {})
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


def prepare_generator_input(
    prompts: Sequence[Mapping[str, Any]],
    n_samples_per_prompt: int,
    sampling_params: dict[str, Any],
    default_env_class: str,
    training_phase: TrainingPhase,
    global_step: int,
) -> tuple[GeneratorInput, list[str]]:
    """The input for rows of a `collate_fn`, each sampled n times, and the uid of each sample."""
    rows = [row for row in prompts for _ in range(n_samples_per_prompt)]
    uids = [row["uid"] for row in rows]
    made = GeneratorInput(
        prompts=[row["prompt"] for row in rows],
        env_classes=[row["env_class"] or default_env_class for row in rows],
        env_extras=[row["env_extras"] for row in rows],
        sampling_params=sampling_params,
        trajectory_ids=[TrajectoryID(uid, index % n_samples_per_prompt) for index, uid in enumerate(uids)],
        batch_metadata=BatchMetadata(global_step, training_phase),
    )
    return made, uids


def get_sampling_params_for_backend(backend: str, sampling_params: Any) -> dict[str, Any]:
    """Sampling parameters of the configuration in vLLM's words. Raises: ValueError for another backend."""
    if backend != "vllm":
        raise ValueError(f"backend is {backend}: requests are vLLM's. Use vllm")
    given: dict[str, Any] = dict(sampling_params)
    names = {"max_generate_length": "max_tokens"}
    fixed = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True}
    return {names.get(name, name): list(value) if name == "stop" else value for name, value in given.items()} | fixed


def concatenate_generator_outputs(generator_outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """One output of several. Raises: ValueError if some have logprobs and others have not."""
    outputs: list[dict[str, Any]] = [dict(output) for output in generator_outputs]
    names = dict.fromkeys(name for output in outputs for name in output)
    joined: dict[str, Any] = {}
    for name in names:
        parts = [output.get(name) for output in outputs]
        present = [part for part in parts if part is not None]
        if name != "rollout_metrics" and 0 < len(present) < len(parts):
            raise ValueError(f"{name} is in {len(present)} of {len(parts)} outputs: all or none must have it")
        joined[name] = [each for part in present for each in part] if present and name != "rollout_metrics" else None
    joined["rollout_metrics"] = get_rollout_metrics(joined["response_ids"], joined["rewards"])
    return joined  # type: ignore[return-value]


def apply_overlong_filtering(
    loss_masks: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], eos_token_id: int
) -> list[list[int]]:
    """Masks without a token for responses that do not end with the end-of-sequence token."""
    pairs = zip(loss_masks, response_ids, strict=True)
    return [list(mask) if response and response[-1] == eos_token_id else [0] * len(mask) for mask, response in pairs]
