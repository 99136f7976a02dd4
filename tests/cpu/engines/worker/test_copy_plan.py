"""Copies that stand for a model's weight loaders, on models with loaders like vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl_train.engines.vllm.worker import copy_plan
from skyrl_train.engines.vllm.worker.copy_plan import CopyPlan, NoPlanError, PlanCheck, find_plan
from skyrl_train.weight_sync.bucket import Bucket, TensorSpec, unpack
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import row_hashes
from tests.support.sending import pack, specs_of


class Loads(nn.Module):
    """A vocabulary with padding, a fused matrix of which this rank has a part of the rows, one with a part of the
    columns, two experts and a norm."""

    def __init__(self, rank: int = 0, ranks: int = 2) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.vocabulary = nn.Embedding(12, 8)
        self.fused = nn.Linear(8, 16 // ranks, bias=False)
        self.columns = nn.Linear(16 // ranks, 8, bias=False)
        self.experts = nn.Linear(4, 12, bias=False)
        self.norm = nn.LayerNorm(8, bias=False)
        with torch.no_grad():
            self.vocabulary.weight[10:] = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "vocabulary":
            self.vocabulary.weight.data[:10].copy_(tensor)
            self.vocabulary.weight.data[10:].fill_(0)
        elif name in ("gate", "up"):
            rows = 8 // self.ranks
            start = rows * (name == "up")
            self.fused.weight.data.narrow(0, start, rows).copy_(tensor.narrow(0, self.rank * rows, rows))
        elif name == "down":
            width = 16 // self.ranks
            self.columns.weight.data.copy_(tensor.narrow(1, self.rank * width, width))
        elif name.startswith("expert"):
            self.experts.weight.data.view(2, 6, 4)[int(name[-1])].copy_(tensor.t())
        else:
            self.norm.weight.data.copy_(tensor)


def elements(module: nn.Module) -> int:
    own = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
    return 80 if isinstance(module, nn.Embedding) else own


def weights(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"vocabulary": (10, 8), "gate": (8, 8), "up": (8, 8), "down": (8, 16), "norm": (8,)}
    shapes |= {"expert.0": (4, 6), "expert.1": (4, 6)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def plan_of(model: nn.Module, specs: list[TensorSpec] | None = None) -> CopyPlan:
    return find_plan(model, specs or specs_of(weights(0)), elements, {})


def deliver(plan: CopyPlan, named_tensors: list[tuple[str, Tensor]], bucket_bytes: int = 2048) -> None:
    plan.begin()
    for bucket in pack(named_tensors, bucket_bytes):
        plan.load(list(unpack(bucket)))
        bucket.data.fill_(255)  # the sender overwrites it


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_do_what_the_loaders_do(rank: int):
    by_loaders, by_copies = Loads(rank), Loads(rank)
    by_loaders.load_weights(weights(1))
    plan = plan_of(by_copies)
    deliver(plan, weights(1))
    assert plan.faults() == []
    for expected, got in zip(by_loaders.parameters(), by_copies.parameters(), strict=True):
        assert torch.equal(expected, got)


def test_finding_a_plan_changes_no_parameter():
    model = Loads()
    before = [parameter.clone() for parameter in model.parameters()]
    plan_of(model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_tensor_that_does_not_come_is_named():
    plan = plan_of(Loads())
    deliver(plan, weights(1)[1:])
    assert plan.faults() == ["1 tensors of the first update are missing: vocabulary"]


@pytest.mark.parametrize(
    ("more", "message"),
    [(("norm", torch.zeros(8)), "arrived twice"), (("ghost", torch.zeros(8)), "was not in the first")],
)
def test_a_tensor_too_many_fails_the_update(more: tuple[str, Tensor], message: str):
    with pytest.raises(WeightSyncError, match=message):
        deliver(plan_of(Loads()), [*weights(1), more])


class Transposes(Loads):
    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor.t().contiguous().t() if name == "gate" else tensor)


class Scales(Loads):
    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor)
        if name == "norm":
            self.norm.weight.data.add_(1)


class Looks(Loads):
    def load(self, name: str, tensor: Tensor) -> None:
        if tensor.abs().max().item() > 0:
            super().load(name, tensor)


class Rounds(Loads):
    """Has a matrix in FP8, into which a copy would round without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.columns.weight = nn.Parameter(self.columns.weight.to(torch.float8_e4m3fn), requires_grad=False)


class Forgets(Loads):
    def load(self, name: str, tensor: Tensor) -> None:
        if name != "down":
            super().load(name, tensor)


class Misses(Loads):
    def load(self, name: str, tensor: Tensor) -> None:
        if name == "up":
            self.fused.weight.data[4:7].copy_(tensor[4:7])
        else:
            super().load(name, tensor)


class Overwrites(Loads):
    def load(self, name: str, tensor: Tensor) -> None:
        super().load("gate" if name == "up" else name, tensor)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Transposes(), "something other than a part"),
        (Scales(), "changes a parameter by aten.add_"),
        (Looks(), "read the values"),
        (Rounds(), "something other than a part"),
        (Forgets(), "do not use down"),
        (Misses(), "56 of 64 elements of fused"),
        (Overwrites(), "parts of fused twice"),
    ],
)
def test_loaders_that_do_more_or_less_than_copy_have_no_plan(model: nn.Module, message: str):
    with pytest.raises(NoPlanError, match=message):
        plan_of(model)


class Packs(Loads):
    """Keeps what the loaders wrote and computes with another form of it."""

    def pack(self) -> None:
        self.columns.weight.data = self.columns.weight.data.flip(0)


@pytest.mark.parametrize(("model", "is_proven"), [(Loads(1), True), (Packs(1), False)])
def test_a_plan_is_proven_only_if_the_parameters_hold_what_came(model: nn.Module, is_proven: bool):
    trial = PlanCheck(plan_of(model))
    buckets: list[Bucket] = list(pack(weights(2), 2048))
    for bucket in buckets:
        trial.watch(list(unpack(bucket)))
        model.load_weights(unpack(bucket))
    if isinstance(model, Packs):
        model.pack()
    assert trial.passed() is is_proven


def test_a_plan_is_proven_by_one_hashing_per_bucket_on_each_side(monkeypatch: pytest.MonkeyPatch):
    """A wait for the device at each copy took 0.4 s of the sync that checks the plan."""
    hashed: list[Tensor] = []

    def counted(data: Tensor) -> Tensor:
        hashed.append(data)
        return row_hashes(data)

    monkeypatch.setattr(copy_plan, "row_hashes", counted)
    model = Loads()
    trial = PlanCheck(plan_of(model))
    buckets = list(pack(weights(2), 4096))
    for bucket in buckets:
        trial.watch(list(unpack(bucket)))
        model.load_weights(unpack(bucket))
    assert len(buckets) < len(weights(2)) and len(hashed) == len(buckets)
    assert trial.passed() and len(hashed) == 2 * len(buckets)


def test_a_plan_is_not_proven_if_one_element_of_one_parameter_differs():
    model = Loads()
    trial = PlanCheck(plan_of(model))
    for bucket in pack(weights(2), 4096):
        trial.watch(list(unpack(bucket)))
        model.load_weights(unpack(bucket))
    with torch.no_grad():
        model.norm.weight[3] += 1e-6
    assert not trial.passed()


def test_a_plan_is_not_proven_by_a_part_of_an_update():
    model = Loads()
    trial = PlanCheck(plan_of(model))
    model.load_weights(weights(2))
    trial.watch(weights(2)[:-1])
    assert not trial.passed()


def moved(model: nn.Module) -> None:
    model.norm.weight.data = model.norm.weight.data.clone()


def removed(model: nn.Module) -> None:
    del model.norm.weight


@pytest.mark.parametrize("change", [moved, removed])
def test_a_plan_is_current_until_a_parameter_changes_its_place(change: Callable[[nn.Module], None]):
    model = Loads()
    plan = plan_of(model)
    model.load_weights(weights(2))
    model.norm.weight = nn.Parameter(model.norm.weight.detach())  # of the same memory
    assert plan.is_current
    change(model)
    assert not plan.is_current


class Unlisted(dict[str, Any]):
    def __iter__(self) -> Any:
        raise AssertionError("all names were gone through to find one")


def test_a_tensor_is_found_without_going_through_all_names():
    """With 18,432 tensors of experts that took 3 s of a sync."""
    model = Loads()
    plan = plan_of(model)
    plan.copies = Unlisted(plan.copies)
    trial = PlanCheck(plan)
    trial.watch(weights(2))
    assert trial._watched[0][0] == [name for name, _ in weights(2)]
