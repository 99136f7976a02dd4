"""Small storages of a rank become one on their way to the host and back, and nobody's view goes stale."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from skyrl_train.megatron.residency import storages
from skyrl_train.megatron.residency.memory import DeviceMemory
from skyrl_train.megatron.residency.state import load_state, save_state
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, ParallelRanks

SHAPES = [(3, 5), (7,), (64, 33), (1,), (2, 3, 4)]
"""No size is a multiple of the alignment."""


def rank(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMemory]:
    """Weights that are views of one buffer, float32 copies of them and, after two steps, their moments and counts."""
    torch.manual_seed(0)
    parameters = [torch.randn(shape) for shape in SHAPES]
    buffer = torch.cat([one.view(-1) for one in parameters]).to(dtype)
    module, start = nn.Module(), 0
    for index, one in enumerate(parameters):
        view = buffer[start : start + one.numel()].view(one.shape)
        module.register_parameter(f"p{index}", nn.Parameter(view))
        start += one.numel()
    mains = [p.detach().clone().float() if dtype == torch.bfloat16 else p for p in module.parameters()]
    optimizer = torch.optim.AdamW(mains, lr=0.1)
    return module, optimizer, DeviceMemory([module], SimpleNamespace(optimizer=optimizer))


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    mains = optimizer.param_groups[0]["params"]
    return mains + [one for main in mains for one in optimizer.state.get(main, {}).values()]


def storages_of(tensors: list[Any]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_updates_between_turns_end_where_those_without_turns_do():
    """Seven turns: with no state, with new state, and with all of it in one storage."""
    _, stayed, _ = rank()
    _, moved, memory = rank()
    memory.offload()
    memory.reload()
    for seed in range(6):
        for optimizer in (stayed, moved):
            step(optimizer, seed)
        before = [tensor.clone() for tensor in tensors_of(moved)]
        assert memory.offload().num_bytes == memory.reload().num_bytes > 0
        assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(moved), strict=True))
    pairs = list(zip(tensors_of(moved), tensors_of(stayed), strict=True))
    assert len(pairs) == 4 * len(SHAPES)
    assert all(torch.equal(a, b) and a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_tensors_keep_their_identity_and_share_one_storage():
    _, optimizer, memory = rank()
    step(optimizer, 0)
    before = tensors_of(optimizer)
    memory.offload()
    memory.reload()
    assert all(a is b for a, b in zip(before, tensors_of(optimizer), strict=True))
    assert len(storages_of(before)) == 1
    starts = sorted((one.data_ptr(), one.nbytes) for one in before)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(starts)), "none overlaps"
    (first, *_) = starts
    assert all((start - first[0]) % storages.ALIGNMENT == 0 for start, _ in starts)
    step(optimizer, 1)
    memory.offload()
    memory.reload()
    assert len(storages_of(before)) == 1


def test_the_memory_is_gone_while_they_are_away_and_there_is_never_a_second_copy(monkeypatch: pytest.MonkeyPatch):
    _, optimizer, memory = rank()
    step(optimizer, 0)
    tensors = tensors_of(optimizer)
    small = [StorageWeakRef(one.untyped_storage()) for one in tensors]
    alive_when_made = []

    def empty(*shape: Any, **options: Any) -> Tensor:
        alive_when_made.append(sum(one.untyped_storage().nbytes() for one in tensors))
        return torch.Tensor.new_empty(torch.zeros(0, dtype=options["dtype"]), *shape)

    memory.offload()
    assert not any(one.untyped_storage().nbytes() for one in tensors)
    monkeypatch.setattr(storages.torch, "empty", empty)
    memory.reload(OPTIMIZER)
    monkeypatch.undo()
    assert alive_when_made == [0]
    assert all(one.expired() for one in small)
    memory.reload()
    memory.offload()
    assert not any(one.untyped_storage().nbytes() for one in tensors)


def test_what_somebody_else_looks_at_keeps_its_storage():
    _, optimizer, memory = rank()
    step(optimizer, 0)
    mains = optimizer.param_groups[0]["params"]
    row, alias = mains[0][1], mains[1].detach()
    expected = row.clone(), alias.clone()
    memory.offload()
    memory.reload()
    sizes = [one.untyped_storage().nbytes() for one in (row, alias)]
    assert all(sizes), "not the old storages, which are empty"
    assert torch.equal(row, expected[0]) and torch.equal(alias, expected[1])
    mains[0].fill_(7.0)
    mains[1].fill_(7.0)
    assert set(row.tolist()) == set(alias.tolist()) == {7.0}
    assert len(storages_of(tensors_of(optimizer))) == 3, "two on their own, the rest in one"


def test_float32_weights_that_are_the_optimizers_own_parameters_stay_in_their_buffer():
    module, optimizer, memory = rank(torch.float32)
    step(optimizer, 0)
    (buffer,) = storages_of(list(module.parameters()))
    for turn in range(1, 3):
        memory.offload()
        memory.reload()
        step(optimizer, turn)
    assert storages_of(list(module.parameters())) == {buffer}
    assert len(storages_of(tensors_of(optimizer))) == 2
    assert all(a is b for a, b in zip(module.parameters(), optimizer.param_groups[0]["params"], strict=True))


def test_parts_of_a_larger_storage_and_transposed_tensors_are_moved_as_they_are():
    """They are all that holds their storage, but not all of it, or not in its order."""
    _, optimizer, memory = rank()
    step(optimizer, 0)
    mains = optimizer.param_groups[0]["params"]
    part = torch.empty(0).set_(torch.arange(10.0).untyped_storage(), 2, (3,))  # type: ignore[call-overload]
    turned = torch.empty_strided((3, 2), (1, 3)).copy_(torch.arange(6.0).view(3, 2))
    optimizer.state[mains[0]] |= {"part": part}
    optimizer.state[mains[1]] |= {"turned": turned}
    memory.offload()
    assert part.untyped_storage().nbytes() == turned.untyped_storage().nbytes() == 0
    memory.reload()
    assert torch.equal(part, torch.arange(2.0, 5.0)) and part.untyped_storage().nbytes() == 40
    assert torch.equal(turned, torch.arange(6.0).view(3, 2)) and turned.stride() == (1, 3)


def test_a_state_that_is_loaded_later_fills_the_memory_that_there_is(tmp_path: Path):
    ranks = ParallelRanks(tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, dp_size=1, is_last_stage=True)
    module, optimizer, memory = rank()
    step(optimizer, 0)
    memory.offload()
    memory.reload()
    expected = [tensor.clone() for tensor in tensors_of(optimizer)]
    save_state(tmp_path / "state.pt", [module], SimpleNamespace(optimizer=optimizer), ranks, 1)
    step(optimizer, 1)
    load_state(tmp_path / "state.pt", [module], SimpleNamespace(optimizer=optimizer), ranks, 1)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), expected, strict=True))
    assert len(storages_of(tensors_of(optimizer))) == 1


def test_frozen_weights_become_one_storage_and_are_copied_once():
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).requires_grad_(False)
    module.register_buffer("scale", torch.arange(3.0))
    memory, expected = DeviceMemory([module]), [one.clone() for one in module.state_dict().values()]
    copied = [(memory.offload(WEIGHTS).num_bytes, memory.reload(WEIGHTS).num_bytes)[0] for _ in range(3)]
    assert copied[0] > copied[1] == copied[2] == module.get_buffer("scale").nbytes
    assert len(storages_of(list(module.parameters()))) == 1
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), expected, strict=True))
    module[0].weight.fill_(3.0)  # type: ignore[union-attr, operator]
    memory.forget_frozen()
    assert memory.offload().num_bytes == memory.reload().num_bytes
    assert set(module[0].weight.view(-1).tolist()) == {3.0}  # type: ignore[union-attr, operator]
