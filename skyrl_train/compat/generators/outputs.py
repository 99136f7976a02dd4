"""Groups of this project <-> inputs and outputs of skyrl_train 0.4's generators."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from skyrl_train.compat.generators.types import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID
from skyrl_train.faults import faults_of, listed
from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample, SamplingParams, VersionSpans

NEEDED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
ENDS = ("stop", "complete", None)
"""Stop reasons of samples that ended by themselves; agents of 0.4 write "complete"."""


def input_of(prompt: Prompt, n_samples: int, params: SamplingParams, metadata: BatchMetadata) -> GeneratorInput:
    return GeneratorInput(
        prompts=[copy.deepcopy(prompt.messages) for _ in range(n_samples)],
        env_classes=[prompt.env_class] * n_samples,
        env_extras=[copy.deepcopy(prompt.extras) for _ in range(n_samples)],
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


def conversations_of(
    output: GeneratorOutput,
    prompt: Prompt,
    n_samples: int,
    policy_version: int,
    tokenizer: Any,
    vocab_size: int | None = None,
) -> list[list[Sample]]:
    """The samples of one group by trajectory, without placeholders (a response of one token that is not trained).

    Raises: ValueError for lists of different lengths, more trajectories than `n_samples`, steps of one that are not
        neighbours, or samples that cannot be trained.
    """
    given: Mapping[str, Any] = output if isinstance(output, Mapping) else {}
    if missing := [name for name in NEEDED if given.get(name) is None]:
        raise ValueError(f"the generator returned no {', '.join(missing)}. Return them, one for each sample")
    size = len(given["response_ids"])
    columns: dict[str, Sequence[Any]] = {
        **{name: given[name] for name in NEEDED},
        "stop_reasons": given.get("stop_reasons") or ["stop"] * size,
        "rollout_logprobs": given.get("rollout_logprobs") or [None] * size,
        "is_last_step": given.get("is_last_step") or [True] * size,
        "trajectory_ids": given.get("trajectory_ids") or [None] * size,
    }
    for name, column in columns.items():
        if len(column) != size:
            raise ValueError(f"the generator returned {size} response_ids and {len(column)} {name}. Return as many")
    ends, ids = columns["is_last_step"], columns["trajectory_ids"]
    if sum(ends) > n_samples or (size and not ends[-1]):
        raise ValueError(
            f"the generator returned {sum(ends)} complete trajectories in {size} samples for {n_samples} inputs. "
            "Return one for each input, with is_last_step where a trajectory has several samples"
        )
    conversations: list[list[Sample]] = [[]]
    for number in range(size):
        if number and not ends[number - 1] and ids[number] != ids[number - 1]:
            raise ValueError(
                f"sample {number} of the generator is of another trajectory than the unfinished one before"
            )
        try:
            sample = _sample({name: each[number] for name, each in columns.items()}, prompt, policy_version, tokenizer)
        except ValueError as error:
            raise ValueError(f"sample {number} of the generator has {error}") from error
        if faults := faults_of(sample, vocab_size):
            raise ValueError(f"sample {number} of the generator {listed(faults)}")
        conversations[-1].append(sample)
        if ends[number]:
            conversations.append([])
    return [samples for samples in conversations[:-1] if not _is_placeholder(samples)]


def _sample(row: Mapping[str, Any], prompt: Prompt, policy_version: int, tokenizer: Any) -> Sample:
    """Logprobs that are not given are NaN, so that nothing can use them. Raises: ValueError."""
    read, response, mask, logprobs = (
        row[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    )
    known = logprobs if logprobs is not None else [float("nan")] * len(response)
    if not len(response) == len(mask) == len(known):
        raise ValueError(
            f"{len(response)} response_ids, {len(mask)} loss_masks and {len(known)} rollout_logprobs. Return as many"
        )
    if not read:
        raise ValueError("no prompt_token_ids, and nothing predicts a first token. Return those of the prompt")
    is_trained = torch.tensor([0] * len(read) + [*mask], dtype=torch.bool)
    text = {"role": "assistant", "content": tokenizer.decode(response, skip_special_tokens=True)}
    return Sample(
        token_ids=torch.tensor([*read, *response], dtype=torch.int64),
        loss_mask=is_trained,
        rollout_logprobs=torch.tensor([0.0] * len(read) + [*known]).masked_fill(~is_trained, 0),
        prompt_length=len(read),
        rewards=_rewards(row["rewards"], len(read), len(response)),
        stop_reason="stop" if row["stop_reasons"] in ENDS else "length",
        turns=sum(after and not before for before, after in pairwise([0, *mask])),
        policy_version=UNKNOWN_VERSION if logprobs is None else policy_version,
        transcript=[*prompt.messages, text] if isinstance(prompt.messages, list) else [text],
        ends_conversation=bool(row["is_last_step"]),
    )


def _is_placeholder(samples: Sequence[Sample]) -> bool:
    return len(samples) == 1 and len(samples[0].token_ids) == samples[0].prompt_length + 1 and samples[0].turns == 0


def _rewards(reward: Any, prompt_length: int, length: int) -> Tensor:
    """[L] float64; a single number is earned by the last token. Raises: ValueError for another number of rewards."""
    rewards = torch.zeros(prompt_length + length, dtype=torch.float64)
    if not isinstance(reward, list | tuple):
        rewards[-1] = float(reward)
        return rewards
    if len(reward) != length:
        raise ValueError(f"{len(reward)} rewards for {length} response_ids. Return a number, or one per token")
    rewards[prompt_length:] = torch.tensor(reward, dtype=torch.float64)
    return rewards


def token_rewards(reward: Any, length: int) -> list[float]:
    """One number for each token of a response; a single one is earned by the last."""
    if isinstance(reward, list | tuple):
        return [float(each) for each in reward]
    return [0.0] * (length - 1) + [float(reward)] * (length > 0)


def output_of(group: Group) -> GeneratorOutput:
    """The samples of a group; rewards are numbers if each sample earned its own with its last token."""
    samples = group.samples
    rewards = [sample.rewards[sample.prompt_length :].tolist() for sample in samples]
    is_final = not any(any(own[:-1]) for own in rewards)
    is_step_wise = not all(sample.ends_conversation for sample in samples)
    conversation = [number for number, conversation in enumerate(group.conversations) for _ in range(len(conversation))]
    return GeneratorOutput(
        prompt_token_ids=[sample.token_ids[: sample.prompt_length].tolist() for sample in samples],
        response_ids=[sample.token_ids[sample.prompt_length :].tolist() for sample in samples],
        rewards=[sample.reward for sample in samples] if is_final else rewards,
        loss_masks=[sample.loss_mask[sample.prompt_length :].long().tolist() for sample in samples],
        stop_reasons=[sample.stop_reason for sample in samples],
        rollout_metrics=None,
        rollout_logprobs=[sample.rollout_logprobs[sample.prompt_length :].tolist() for sample in samples],
        trajectory_ids=[TrajectoryID(group.prompt.uid, number) for number in conversation],
        is_last_step=[sample.ends_conversation for sample in samples] if is_step_wise else None,
    )


def with_output(group: Group, output: Mapping[str, Any]) -> Group:
    """The group with the rewards and loss masks of an output. Raises: ValueError if it has other samples, or trains
    other tokens.
    """
    samples = []
    for number, (sample, reward, mask) in enumerate(
        zip(group.samples, output["rewards"], output["loss_masks"], strict=True)
    ):
        length = len(sample.token_ids) - sample.prompt_length
        if len(mask) != length:
            raise ValueError("postprocess_generator_output changed the length of a response. Change rewards and masks")
        rewards = _rewards(reward, sample.prompt_length, length)
        is_trained = torch.tensor([0] * sample.prompt_length + [*mask], dtype=torch.bool)
        changed = [name for name, value in _fixed(sample).items() if not _is_same(output, name, number, value)]
        if bool((is_trained & ~sample.loss_mask).any()):
            changed.append("loss_masks from 0 to 1")
        if changed:
            raise ValueError(
                f"postprocess_generator_output changed {', '.join(changed)} of sample {number}. Change rewards, and "
                "loss_masks from 1 to 0"
            )
        spans = _spans_of(sample, is_trained)
        samples.append(replace(sample, rewards=rewards, loss_mask=is_trained, version_spans=spans))
    return replace(group, samples=tuple(samples))


def _spans_of(sample: Sample, is_trained: Tensor) -> VersionSpans:
    """The versions of the tokens that are still trained."""
    versions = [version for version, count in sample.version_spans for _ in range(count)]
    if len(versions) != int(sample.loss_mask.sum()):
        return sample.version_spans
    kept = itertools.compress(versions, is_trained[sample.loss_mask].tolist())
    return tuple((version, len(list(run))) for version, run in itertools.groupby(kept))


def _fixed(sample: Sample) -> dict[str, Any]:
    """Values that a hook must not change."""
    start = sample.prompt_length
    return {
        "prompt_token_ids": sample.token_ids[:start],
        "response_ids": sample.token_ids[start:],
        "rollout_logprobs": sample.rollout_logprobs[start:],
        "stop_reasons": sample.stop_reason,
    }


def _is_same(output: Mapping[str, Any], name: str, number: int, value: Tensor | str) -> bool:
    """Whether the output has this value, or no such column. Logprobs may be NaN."""
    if name not in output:
        return True
    column = output[name]
    if column is None or not isinstance(value, Tensor):
        return column is not None and bool(column[number] == value)
    return torch.equal(torch.as_tensor(column[number], dtype=value.dtype).nan_to_num(), value.nan_to_num())
