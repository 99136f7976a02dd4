"""Layouts under test, and the comparison of each with Hugging Face and with one process."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config import load_config
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.megatron.model.model import Model, build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.passes.packing import MicroBatch, Packer
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import Layout, Trial, run_layout, share_of
from skyrl_train.megatron.verify.outcome import FLOAT32, Difference, Outcome, compare
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial, write_family

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
}
Sizes = dict[str, tuple[int, dict[str, Any]]]
"""name -> (processes, sizes)"""
DENSE: Sizes = {
    "one process": (1, {}),
    "TP2": (2, {"tp": 2, "sp": False}),
    "TP2 SP": (2, {"tp": 2}),
    "PP2": (2, {"pp": 2}),
    "PP2 VPP2": (2, {"pp": 2, "vpp": 2}),
    "DP2": (2, {}),
    "CP2": (2, {"cp": 2}),
}
FOUR: Sizes = {
    "TP2 PP2": (4, {"tp": 2, "pp": 2}),
    "DP2 PP2": (4, {"pp": 2}),
    "TP2 DP2": (4, {"tp": 2}),
    "CP2 TP2": (4, {"cp": 2, "tp": 2}),
    "PP3": (3, {"pp": 3}),
    "PP4": (4, {"pp": 4}),
}
EXPERT: Sizes = {
    "one process": (1, {}),
    "TP2": (2, {"tp": 2}),
    "EP2": (2, {"ep": 2}),
    "TP2 ETP1": (2, {"tp": 2, "etp": 1}),
    "TP2 EP2": (2, {"tp": 2, "ep": 2, "etp": 1}),
    "PP2": (2, {"pp": 2}),
    "CP2": (2, {"cp": 2}),
}
EXPERT_FOUR: Sizes = {
    "EP2 PP2": (4, {"ep": 2, "pp": 2}),
    "EP2 ETP2": (4, {"tp": 2, "ep": 2, "etp": 2}),
    "CP2 EP2": (4, {"cp": 2, "ep": 2}),
    "EP2 DP4": (4, {"ep": 2}),
}
SMALL = 64
"""Tokens of a micro-batch that cut the mini-batch into several."""
WHOLE = 100_000


@functools.cache
def base_config() -> MegatronConfig:
    config = load_config().trainer.policy.megatron_config
    return replace(config, logprobs_chunk_size=7, recompute_logits=True)


def layout(processes: int, sizes: dict[str, Any], max_tokens: int = SMALL, **changes: Any) -> Layout:
    megatron = replace(base_config(), **{SHORT[name]: size for name, size in sizes.items()}, **changes)
    return Layout(megatron, processes, max_tokens)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def model(name: str) -> Path:
    return write_family(name, Path(_folder().name, name))


@functools.cache
def reference(name: str) -> tuple[Trial, Outcome, Outcome]:
    """(trial, Hugging Face, one Megatron process with one micro-batch)"""
    trial = make_trial(model(name))
    return trial, hugging_face(trial), run_layout(trial, layout(1, {}, WHOLE))


def join_and_pack(
    rendezvous: Rendezvous, trial: Trial, one: Layout, dtype: torch.dtype
) -> tuple[Model, list[MicroBatch]]:
    """One rank's model and its micro-batches of the trial; old and reference logprobs are 0."""
    batch = share_of(trial, one, join(rendezvous, one.megatron, 1))
    policy = build_model(trial.model_path, one.megatron, dtype, trainable=True)
    packer = Packer.of_layout(sequence_parallel=policy.bridge.config.sequence_parallel)
    zeros = torch.zeros(batch.token_ids.numel())
    signals = {"old_logprobs": zeros, "ref_logprobs": zeros}
    return policy, [packer.pack(batch, samples, signals) for samples in batch.mini_batches[0]]


def assert_exact(difference: Difference) -> None:
    assert not FLOAT32.exceeded(difference), "; ".join(FLOAT32.exceeded(difference))


def check(name: str, one: Layout) -> None:
    trial, hf, single = reference(name)
    outcome = run_layout(trial, one)
    assert_exact(compare(comparable(outcome, hf), hf))
    assert_exact(compare(outcome, single))


def cases(table: Sizes) -> Any:
    return pytest.mark.parametrize(("processes", "sizes"), table.values(), ids=table)
