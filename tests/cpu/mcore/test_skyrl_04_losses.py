"""Losses of 0.4 through Megatron: gradients and metrics of the built-in loss under every split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms.build import bind
from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.tables import LOSSES
from skyrl_train.config import load_config
from skyrl_train.megatron.verify.layout_check import run_objectives
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout
from tests.support.old_functions import registered

pytestmark = pytest.mark.slow
NAMES = ("regular", "old_clip", "old_mean", "old_two_parts")


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    with registered():
        yield


def objectives(first: Objective) -> list[Objective]:
    """The trial's objective with each loss, without its other terms."""
    policy, values = first.terms[0], load_config().trainer.algorithm.values
    values |= {"loss_reduction": policy.reduction}
    return [replace(first, terms=(replace(policy, loss=bind(LOSSES.resolve(name), values)),)) for name in NAMES]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3", tmp_path_factory.mktemp("model"))


def outcomes(path: Path, processes: int, sizes: dict[str, Any]) -> dict[str, Any]:
    trial = make_trial(path)
    return dict(zip(NAMES, run_objectives(trial, layout(processes, sizes), objectives(trial.objective)), strict=True))


@pytest.mark.parametrize(("processes", "sizes"), [(1, {}), (2, {}), (2, {"pp": 2})], ids=["one", "DP2", "PP2"])
def test_an_old_loss_has_the_gradient_and_the_metrics_of_the_built_in_one(path: Path, processes: int, sizes: Any):
    found = outcomes(path, processes, sizes)
    native, old = found["regular"], found["old_clip"]
    assert native.gradients.keys() == old.gradients.keys()
    for name, gradient in native.gradients.items():
        assert gradient.equal(old.gradients[name]), name
    assert native.metrics["policy/final_loss"] == old.metrics["policy/final_loss"]
    share = "policy/loss_metrics/clip_ratio"
    assert old.metrics[share] == pytest.approx(native.metrics[share], rel=1e-5) and native.metrics[share] > 0


def test_sums_of_reductions_do_not_depend_on_the_split(path: Path):
    one, two = outcomes(path, 1, {}), outcomes(path, 2, {})
    for loss in ("old_mean", "old_two_parts"):
        for name, gradient in one[loss].gradients.items():
            difference = (gradient - two[loss].gradients[name]).norm() / gradient.norm().clamp(min=1e-12)
            assert difference < 1e-5, (loss, name, difference)
