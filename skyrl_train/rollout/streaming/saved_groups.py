"""Finished groups as bytes for checkpoints: a safetensors file, so nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from skyrl_train.types import UNKNOWN_VERSION, Group, Prompt, Sample

COLUMNS = {
    "token_ids": torch.int32,
    "loss_mask": torch.bool,
    "rollout_logprobs": torch.float32,
    "rewards": torch.float64,
}
"""Fields of all samples end to end, [T] each: 17 bytes per token."""
FIELDS = tuple(field.name for field in fields(Sample) if field.name not in (*COLUMNS, "version_spans"))
"""The other fields, which are JSON."""
HEADER = "header"


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A finished group and its bookkeeping."""

    group: Group
    epoch: int
    started: int
    """Step at which the group started (`Ticket.step`)."""
    finished: int
    """Step at which the group was finished (`Finished.step`)."""


def to_bytes(groups: Sequence[SavedGroup]) -> bytes:
    """The groups without their prompts, which are read from the data again.

    Raises: TypeError if the metrics of an environment are not JSON; numbers of numpy and torch are.
    """
    samples = [sample for saved in groups for sample in (*saved.group.samples, *saved.group.greedy)]
    tensors = {name: _joined([getattr(sample, name) for sample in samples], kind) for name, kind in COLUMNS.items()}
    header = json.dumps([_described(saved) for saved in groups], default=_plain).encode()
    return save(tensors | {HEADER: torch.frombuffer(bytearray(header), dtype=torch.uint8)})


def from_bytes(data: bytes, prompts: Mapping[str, Prompt], newer: int = 0) -> list[SavedGroup]:
    """The groups of `to_bytes`. Args: prompts: by uid; newer: is added to all policy versions.

    Raises: ValueError for other contents, or a prompt that is missing.
    """
    try:
        tensors = load(data)
        header = json.loads(tensors.pop(HEADER).numpy().tobytes())
        columns = {name: tensors[name] for name in COLUMNS}
        start, groups = 0, []
        for described in header:
            samples = []
            for values in described["samples"]:
                end = start + values["length"]
                samples.append(_sample(values, {name: column[start:end] for name, column in columns.items()}, newer))
                start = end
            first_greedy = described["num_samples"]
            group = Group(prompts[described["uid"]], tuple(samples[:first_greedy]), tuple(samples[first_greedy:]))
            groups.append(SavedGroup(group, described["epoch"], described["started"], described["finished"]))
        if start != len(columns["token_ids"]):
            raise ValueError(f"its groups have {start} tokens of {len(columns['token_ids'])}")
        return groups
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the finished groups of the checkpoint cannot be read ({type(error).__name__}: {error}). Resume from "
            "another checkpoint (trainer.resume_mode=from_path), with the data and the version of skyrl_train that "
            "wrote it"
        ) from error


def _joined(parts: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    return torch.cat([part.to(kind) for part in parts]) if parts else torch.empty(0, dtype=kind)


def _described(saved: SavedGroup) -> dict[str, Any]:
    group = saved.group
    samples = [
        {name: getattr(sample, name) for name in FIELDS}
        | {"length": len(sample.token_ids), "version_spans": sample.version_spans}
        for sample in (*group.samples, *group.greedy)
    ]
    own = {"uid": group.prompt.uid, "num_samples": len(group.samples), "samples": samples}
    return own | {"epoch": saved.epoch, "started": saved.started, "finished": saved.finished}


def _sample(values: Mapping[str, Any], columns: Mapping[str, Tensor], newer: int) -> Sample:
    fields: dict[str, Any] = {name: column.clone() for name, column in columns.items()}
    fields |= {name: values[name] for name in FIELDS}
    fields["token_ids"] = fields["token_ids"].to(torch.int64)
    if fields["policy_version"] != UNKNOWN_VERSION:
        fields["policy_version"] += newer
    spans = tuple((version + newer, count) for version, count in values["version_spans"])
    return Sample(**fields, version_spans=spans)


def _plain(value: Any) -> Any:
    """A number of numpy or torch as JSON. Raises: TypeError for anything else."""
    if callable(item := getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return item()
    raise TypeError(f"{value!r:.100} of type {type(value).__name__} is not JSON")
