"""Groups of this project <-> inputs and outputs of skyrl_train 0.4's generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from skyrl_train.compat.generators.types import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID
from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample, SamplingParams


def input_of(prompt: Prompt, n_samples: int, params: SamplingParams, metadata: BatchMetadata) -> GeneratorInput:
    """The input of one group."""
    return GeneratorInput(
        prompts=[prompt.messages] * n_samples,
        env_classes=[prompt.env_class] * n_samples,
        env_extras=[dict(prompt.extras) for _ in range(n_samples)],
        sampling_params=vllm_params(params),
        trajectory_ids=[TrajectoryID(prompt.uid, index) for index in range(n_samples)],
        batch_metadata=metadata,
    )


def vllm_params(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters in vLLM's words."""
    return {
        "max_tokens": params.max_generate_length,
        **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")},
        "stop": list(params.stop) or None,
        **{"logprobs": 0, "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True},
    }


def samples_of(output: GeneratorOutput, prompt: Prompt, policy_version: int, tokenizer: Any) -> list[Sample]:
    """Samples of one group, without placeholders (a response of one token that is not trained).

    Raises: ValueError for lists of different lengths, or for step-wise trajectories.
    """
    if output.get("is_last_step") is not None:
        raise ValueError(
            "the generator returned is_last_step: step-wise trajectories are not served. Return a list of samples from "
            "a rollout (generator.rollout, docs/extending.md)"
        )
    prompts, responses, masks = output["prompt_token_ids"], output["response_ids"], output["loss_masks"]
    logprobs: Sequence[list[float] | None] = output.get("rollout_logprobs") or [None] * len(responses)
    reasons = output.get("stop_reasons") or ["stop"] * len(responses)
    samples = []
    parts = zip(prompts, responses, output["rewards"], masks, logprobs, reasons, strict=True)
    for number, (own_prompt, response, reward, mask, own_logprobs, reason) in enumerate(parts):
        own_rewards = token_rewards(reward, len(response))
        known = own_logprobs if own_logprobs is not None else [float("nan") if written else 0.0 for written in mask]
        if not len(response) == len(mask) == len(own_rewards) == len(known):
            raise ValueError(
                f"sample {number} of the generator has {len(response)} response_ids, {len(mask)} loss_masks, "
                f"{len(own_rewards)} rewards and {len(known)} rollout_logprobs: the numbers must be equal"
            )
        if len(response) == 1 and not any(mask):
            continue
        read = len(own_prompt)
        is_trained = torch.tensor([0] * read + [*mask], dtype=torch.bool)
        text = {"role": "assistant", "content": tokenizer.decode(response, skip_special_tokens=True)}
        samples.append(
            Sample(
                token_ids=torch.tensor([*own_prompt, *response], dtype=torch.int64),
                loss_mask=is_trained,
                rollout_logprobs=torch.tensor([0.0] * read + [*known]).masked_fill(~is_trained, 0),
                prompt_length=read,
                rewards=torch.tensor([0.0] * read + own_rewards, dtype=torch.float64),
                stop_reason="length" if reason == "length" else "stop",
                turns=sum(after and not before for before, after in zip([0, *mask], mask, strict=False)),
                policy_version=UNKNOWN_VERSION if own_logprobs is None else policy_version,
                transcript=[*prompt.messages, text] if isinstance(prompt.messages, list) else [text],
            )
        )
    return samples


def token_rewards(reward: Any, length: int) -> list[float]:
    """One number for each token of a response."""
    if isinstance(reward, list | tuple):
        return [float(each) for each in reward]
    return [0.0] * (length - 1) + [float(reward)]


def output_of(group: Group) -> GeneratorOutput:
    """The samples of a group; rewards are numbers if each sample earned its own with its last token."""
    samples = group.samples
    rewards = [sample.rewards[sample.prompt_length :].tolist() for sample in samples]
    is_final = not any(any(own[:-1]) for own in rewards)
    return GeneratorOutput(
        prompt_token_ids=[sample.token_ids[: sample.prompt_length].tolist() for sample in samples],
        response_ids=[sample.token_ids[sample.prompt_length :].tolist() for sample in samples],
        rewards=[own[-1] if own else 0.0 for own in rewards] if is_final else rewards,
        loss_masks=[sample.loss_mask[sample.prompt_length :].long().tolist() for sample in samples],
        stop_reasons=[sample.stop_reason for sample in samples],
        rollout_metrics=None,
        rollout_logprobs=[sample.rollout_logprobs[sample.prompt_length :].tolist() for sample in samples],
        trajectory_ids=[TrajectoryID(group.prompt.uid, index) for index in range(len(samples))],
        is_last_step=None,
    )


def with_output(group: Group, output: Mapping[str, Any]) -> Group:
    """The group with the rewards and loss masks of an output. Raises: ValueError if it has other samples."""
    samples = []
    for sample, reward, mask in zip(group.samples, output["rewards"], output["loss_masks"], strict=True):
        read, length = sample.prompt_length, len(sample.token_ids) - sample.prompt_length
        rewards = torch.tensor([0.0] * read + token_rewards(reward, length)[:length], dtype=torch.float64)
        is_trained = torch.tensor([0] * read + [*mask], dtype=torch.bool)
        if not len(rewards) == len(is_trained) == len(sample.token_ids):
            raise ValueError("postprocess_generator_output changed the length of a response. Change rewards and masks")
        samples.append(replace(sample, rewards=rewards, loss_mask=is_trained & sample.loss_mask))
    return replace(group, samples=tuple(samples))
