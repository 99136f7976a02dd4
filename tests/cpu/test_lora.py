"""Adapters on Megatron have the gradient that PEFT's have on Hugging Face's model, under every layout."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Adapted, peft_gradients, peft_model, write_adapter
from families import hugging_face, make_trial
from layouts import EXPERT, FOUR, assert_exact, cases, layout, model, without_buffers

from skyrl_train.config import LoraConfig
from skyrl_train.megatron.layout_check import Outcome, Trial, compare, run_layout

DENSE = {
    "one process": (1, {}),
    "TP2": (2, {"tp": 2, "sp": False}),
    "TP2 SP": (2, {"tp": 2}),
    "TP4 SP, more ranks than keys": (4, {"tp": 4}),
    "PP2": (2, {"pp": 2}),
    "PP2 VPP2": (2, {"pp": 2, "vpp": 2}),
    "DP2": (2, {}),
    "CP2": (2, {"cp": 2}),
}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def adapted(family: str, **changes: Any) -> LoraConfig:
    return write_adapter(Path(_folder().name, f"{family} {changes}"), model(family), **changes)


@functools.cache
def with_adapter(family: str, **changes: Any) -> tuple[Trial, Outcome]:
    """(trial, autograd through Hugging Face's model)"""
    lora = adapted(family, **changes)
    trial = replace(make_trial(model(family)), lora=lora)
    reference = Adapted(model(family), lora)
    return trial, hugging_face(trial, model=reference, gradients_of=Adapted.gradients).outcome


def check(family: str, one: Any, **changes: Any) -> None:
    trial, hf = with_adapter(family, **changes)
    assert_exact(compare(without_buffers(run_layout(trial, one), hf.metrics), hf))


def test_peft_computes_the_gradient_that_layouts_are_compared_with():
    trial, hf = with_adapter("qwen3_tied")
    assert trial.lora is not None and trial.lora.path is not None
    theirs = peft_model(trial.model_path, trial.lora.path)
    assert_exact(compare(hugging_face(trial, model=theirs, gradients_of=peft_gradients).outcome, hf))


@cases(DENSE)
def test_adapters_of_a_dense_model_have_pefts_gradient(processes: int, sizes: dict[str, Any]):
    check("qwen3_tied", layout(processes, sizes))


@cases(EXPERT | {"EP2 ETP2": (4, {"tp": 2, "ep": 2, "etp": 2})})
def test_adapters_of_experts_have_pefts_gradient(processes: int, sizes: dict[str, Any]):
    check("qwen3_moe", layout(processes, sizes))
