"""Validation of submitted groups and rows, and their conversion to jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.algorithms.build import needs_logprobs
from skyrl_train.algorithms.tables import compares_samples
from skyrl_train.batching.split import mini_batches_of
from skyrl_train.checks.model_folder import loaded_from
from skyrl_train.config import Config
from skyrl_train.data.chat import check_messages
from skyrl_train.data.sft import ExampleReader, check_tokens
from skyrl_train.data.text import shortened
from skyrl_train.service.job import ChatSample, SaveJob, SftJob, TokenSample, TrainJob
from skyrl_train.spelling import nearest
from skyrl_train.types import UNKNOWN_VERSION, Example, Group, Prompt, Sample, VersionSpans, final_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST = torch.finfo(torch.float32).max
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Values that leave the model's distribution unchanged."""
ENDED, CUT = ("stop", "tool_calls"), ("length", "abort", "repetition")
"""Values of `finish_reason` of answers that the model ended, and of those that the engine cut off."""


class JobReader:
    """Converts submissions to jobs. Every method raises ValueError with the position, the problem and a remedy."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, max_tokens: int) -> None:
        """Args: max_tokens: of one sample."""
        self._reader = ExampleReader(tokenizer, "all", config.generator.chat_template_kwargs, max_tokens)
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._mini_batch_size = config.trainer.policy_mini_batch_size
        self._estimator = config.trainer.algorithm.advantage_estimator
        self._temperature = config.generator.sampling_params.temperature
        self._models = loaded_from(config.trainer)
        self._needs_logprobs = needs_logprobs(config.trainer.algorithm.values)

    def train(self, groups: object) -> TrainJob:
        """Groups of one prompt's samples each: ChatSample, TokenSample, or dicts with their fields."""
        read: list[Group] = []
        sampled_by: dict[int, str] = {}
        has_logprobs = True
        groups = _filled(groups, "groups", "group")
        mini_batches_of(len(groups), self._mini_batch_size)
        for number, group in enumerate(groups):
            where = f"group {number}"
            group = _filled(group, where, "sample")
            if len(group) == 1 and compares_samples(self._estimator):
                raise ValueError(
                    f"{where} has one sample, to which trainer.algorithm.advantage_estimator={self._estimator} gives "
                    "no advantage. Submit several samples of each prompt, or use reinforce++"
                )
            samples = []
            for index, given in enumerate(group):
                try:
                    typed = typed_sample(given)
                    samples.append(self._sample(typed))
                    versions = _versions(typed)
                except ValueError as error:
                    raise ValueError(f"{where}, sample {index}: {error}") from error
                sampled_by |= {version: f"{where}, sample {index}" for version in versions if version not in sampled_by}
                has_logprobs &= isinstance(typed, TokenSample) and typed.logprobs is not None
            prompt = Prompt(uid=str(number), messages=[], env_class="", extras={}, data_source="service")
            read.append(Group(prompt, tuple(samples)))
        return TrainJob(tuple(read), has_logprobs, sampled_by)

    def sft(self, rows: object) -> SftJob:
        """Rows as in docs/sft.md."""
        examples = []
        for number, row in enumerate(_filled(rows, "rows", "row")):
            if not isinstance(row, Mapping):
                raise ValueError(f"row {number} must be a dict, got {_short(row)}")
            try:
                ids, mask = self._reader.tokens(dict(row))
                self._check(ids, mask)
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
            mask[0] = False
            examples.append(Example(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask)))
        return SftJob(tuple(examples))

    def save(self, folder: object) -> SaveJob:
        if not isinstance(folder, str) or not folder.startswith("/"):
            raise ValueError(f"folder is {_short(folder)}: it must be an absolute path on the service's node")
        if key := self._models.get(Path(folder).resolve()):
            raise ValueError(f"folder is {folder}: the service loads {key} from it. Choose another folder")
        return SaveJob(folder)

    def _sample(self, given: ChatSample | TokenSample) -> Sample:
        reward = _number(given.reward, "reward")
        check_sampling(given.sampling_params, self._temperature)
        is_cut = _is_cut(given.finish_reason)
        logprobs: list[float] | None = None
        if isinstance(given, ChatSample):
            ids, mask = self._reader.tokens({"messages": check_messages(given.messages)}, is_cut)
        else:
            ids, mask, logprobs = _of_tokens(given)
        self._check(ids, mask, may_be_empty=is_cut)
        if logprobs is None and self._needs_logprobs:
            raise ValueError(
                "it has no logprobs, and the service's trainer.algorithm (corrections, policy_loss_type or "
                "prox_logp_method) weighs tokens by them. Submit token_ids with the engine's logprobs, or set "
                "trainer.algorithm.corrections=[]"
            )
        mask[0] = False  # no token predicts the first
        trained = torch.tensor(mask)
        given_logprobs = torch.zeros(len(ids)) if logprobs is None else torch.tensor(logprobs, dtype=torch.float32)
        return Sample(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            loss_mask=trained,
            rollout_logprobs=given_logprobs.masked_fill(~trained, 0.0),
            prompt_length=mask.index(True) if any(mask) else len(ids),
            rewards=final_reward(len(ids), reward),
            stop_reason="length" if is_cut else "stop",
            turns=sum(now and not before for before, now in pairwise([False, *mask])),
            policy_version=UNKNOWN_VERSION if logprobs is None else min(_versions(given), default=UNKNOWN_VERSION),
            version_spans=_spans(given, num_written=sum(mask)),
        )

    def _check(self, ids: list[int], mask: list[bool], *, may_be_empty: bool = False) -> None:
        check_tokens(ids, mask, self._vocab_size, may_be_empty=may_be_empty)
        if len(ids) > self._max_tokens:
            raise ValueError(f"it has {len(ids)} tokens, and the model takes {self._max_tokens}. Shorten it")


def check_sampling(given: object, temperature: float) -> None:
    """Args: given: `sampling_params` of an engine's answer, or None; temperature: the trained one.

    Raises: ValueError for the first parameter that changes the distribution.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ValueError(f"sampling_params must be a dict, as in the engine's answer, got {given!r:.60}")
    for name, value in given.items():
        if name == "temperature":
            if value != temperature:
                raise ValueError(
                    f"sampling_params.temperature is {value!r}: the service trains at {temperature:g} "
                    "(generator.sampling_params.temperature). Sample at this temperature"
                )
        elif value and value != NEUTRAL.get(name):  # 0, false and null disable a parameter
            neutral = f"Set it to {NEUTRAL[name]:g}" if name in NEUTRAL else "Remove it from the request"
            raise ValueError(
                f"sampling_params.{name} is {value!r}: the sample is not from the distribution that is trained, over "
                f"all tokens. {neutral}"
            )


def _is_cut(finish_reason: object) -> bool:
    """Whether the engine cut off the answer. Raises: ValueError for an unknown value."""
    if finish_reason not in (None, *ENDED, *CUT):
        allowed = ", ".join((*ENDED, *CUT))
        raise ValueError(
            f"finish_reason is {shortened(finish_reason)}: copy that of the engine's answer, one of {allowed}. Leave "
            "out answers that failed"
        )
    return finish_reason in CUT


def typed_sample(given: object) -> ChatSample | TokenSample:
    """Raises: ValueError for anything but a sample or a dict with its fields."""
    if isinstance(given, ChatSample | TokenSample):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a dict, ChatSample or TokenSample, got {_short(given)}")
    kind: type[ChatSample | TokenSample] = ChatSample if "messages" in given else TokenSample
    names = [field.name for field in fields(kind)]
    required = [field.name for field in fields(kind) if field.default is MISSING]
    for key in given:
        if key not in names:
            near = nearest(str(key), names)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"{shortened(key)} is not a field of {kind.__name__}; {hint}")
    if missing := [name for name in required if name not in given]:
        either = "" if kind is ChatSample else " (or messages and reward)"
        raise ValueError(f"{', '.join(missing)} is missing: a sample has {', '.join(required)}{either}")
    return kind(**given)


def _of_tokens(given: TokenSample) -> tuple[list[int], list[bool], list[float] | None]:
    ids = _list(given.token_ids, "token_ids")
    mask = _list(given.loss_mask, "loss_mask")
    logprobs = None if given.logprobs is None else _list(given.logprobs, "logprobs")
    for name, values in (("loss_mask", mask), ("logprobs", logprobs)):
        if values is not None and len(values) != len(ids):
            raise ValueError(f"token_ids has {len(ids)} entries and {name} {len(values)}: they must be equally many")
    _require_integers(ids, "token_ids")
    if wrong := [value for value in mask if value not in (0, 1)]:
        raise ValueError(f"loss_mask holds {shortened(wrong[0])}: 1 marks a token that the policy wrote, 0 another")
    trained = [bool(value) for value in mask]
    if logprobs is None:
        return ids, trained, None
    read = [_number(value, "logprobs") if wrote else 0.0 for value, wrote in zip(logprobs, trained, strict=True)]
    return ids, trained, read


def _versions(given: ChatSample | TokenSample) -> list[int]:
    if given.policy_versions is None:
        return []
    versions = _list(given.policy_versions, "policy_versions")
    _require_integers(versions, "policy_versions")
    return versions


def _spans(given: ChatSample | TokenSample, num_written: int) -> VersionSpans:
    """Clients name versions without their tokens, so only a single version gives spans."""
    versions = set(_versions(given))
    return ((versions.pop(), num_written),) if len(versions) == 1 else ()


def _require_integers(values: list[Any], name: str) -> None:
    if wrong := [value for value in values if isinstance(value, bool) or not isinstance(value, int)]:
        raise ValueError(f"{name} holds {shortened(wrong[0])}: they must be whole numbers")


def _list(value: Any, name: str) -> list[Any]:
    """Accepts arrays, and numbers of numpy and torch."""
    return [_plain(item) for item in _filled(_plain(value), name, "number")]


def _plain(value: Any) -> Any:
    """Python's number or list for numpy's or torch's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any, name: str) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{name} is {_short(value)}: it must be a finite number")
    return float(value)


def _filled(value: object, name: str, of: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise ValueError(f"{name} must be a list of at least one {of}, got {_short(value)}")
    return list(value)


def _short(value: object) -> str:
    return f"{type(value).__name__} {shortened(value)}"
