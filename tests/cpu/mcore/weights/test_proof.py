"""An export is checked against the live parameters: right ones pass in every layout, planted faults are named."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.megatron.model.model import Model, build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.verify.layout_check import OPTIMIZER
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.weights import export as export_module
from skyrl_train.megatron.weights.export import export, export_tasks
from skyrl_train.megatron.weights.proof import LiveSums
from skyrl_train.megatron.weights.word_sums import WordSums
from skyrl_train.ranks import Rendezvous
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.families import write_family
from tests.support.layouts import layout
from tests.support.planted_faults import held

Named = Iterator[tuple[str, Tensor]]
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied, padded vocabulary, TP2": ("qwen3_tied", 2, {"tp": 2}),
    "biases, TP2 PP2": ("qwen2", 4, {"tp": 2, "pp": 2}),
    "DP2": ("qwen3", 2, {}),
    "experts EP2 PP2": ("qwen3_moe", 4, {"ep": 2, "pp": 2}),
    "experts TP2 ETP2": ("mixtral", 2, {"tp": 2, "etp": 2}),
    "latent attention EP2": ("deepseek_v3", 2, {"ep": 2}),
    "shared expert TP2 ETP1": ("qwen2_moe", 2, {"tp": 2, "etp": 1}),
}


def plain(model: Model, dtype: torch.dtype) -> Named:
    return export(model, dtype)


def reused_tasks(model: Model, dtype: torch.dtype) -> Named:
    """Tasks that were made before the last step and hold what they read then."""
    tasks = [held(task) for task in export_tasks(model)]
    _train(model)
    return export(model, dtype, tasks=tasks)


def kept_tasks(model: Model, dtype: torch.dtype) -> Named:
    """Tasks that were made before the last step, of a model whose parameters lie elsewhere since then."""
    tasks = export_tasks(model)
    _train(model)
    for module in model.modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    return export(model, dtype, tasks=tasks)


def one_stale(model: Model, dtype: torch.dtype) -> Named:
    old = {name: tensor.clone() for name, tensor in export(model, dtype)}
    _train(model)
    for name, tensor in export(model, dtype):
        yield name, old[name] if name.endswith("layers.0.self_attn.o_proj.weight") else tensor


def swapped_pair(model: Model, dtype: torch.dtype) -> Named:
    """Two tensors of equal shape under each other's names."""
    for name, tensor in list(export(model, dtype)):
        other = {"0": "1", "1": "0"}
        parts = name.split(".")
        if name.endswith("o_proj.weight") and parts[2] in other:
            parts[2] = other[parts[2]]
        yield ".".join(parts), tensor


def a_shard_twice(model: Model, dtype: torch.dtype) -> Named:
    """Every rank's part in the place of its neighbour's."""
    gather = export_module.gather_parts

    def own_part(part: Tensor, group: Any) -> list[Tensor]:
        return [part] * len(gather(part, group))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "gather_parts", own_part)
        yield from export(model, dtype)


def a_shard_alone(model: Model, dtype: torch.dtype) -> Named:
    """Of layers that are split by columns, the owner's own part as the whole: the memory of its live tensor."""
    gather = export_module.gather_parts

    def own_part(part: Tensor, group: Any) -> list[Tensor]:
        parts = gather(part, group)
        return [part] if len(part) == model.bridge.hf_config.hidden_size else parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "gather_parts", own_part)
        yield from export(model, dtype)


def without_the_last(model: Model, dtype: torch.dtype) -> Named:
    yield from list(export(model, dtype))[:-1]


@torch.no_grad()
def _train(model: Model) -> None:
    for module in model.modules:
        for parameter in module.parameters():
            parameter.mul_(1.01)


Plan = Callable[[Model, torch.dtype], Named]


def _check(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, Plan, torch.dtype]) -> str | None:
    """What the check said on this rank; None if nothing."""
    path, megatron, exported, dtype = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=True)
    build_optimizer(model, OPTIMIZER)
    sums = LiveSums(model)
    for _ in sums.checked(export(model, dtype), dtype):
        pass
    try:
        for _ in sums.checked(exported(model, dtype), dtype):
            pass
    except WeightSyncError as error:
        return str(error)
    return None


def said(case: str, exported: Plan, folder: Path, dtype: torch.dtype = torch.float32) -> list[str]:
    family, processes, sizes = LAYOUTS[case]
    source = _source(family, folder)
    arguments = (str(source), layout(processes, sizes).megatron, exported, dtype)
    return [text for text in run_on_ranks(_check, arguments, processes, timeout_s=120) if text is not None]


@functools.cache
def _source(family: str, folder: Path) -> Path:
    return write_family(family, folder / family)


@pytest.mark.parametrize("case", LAYOUTS)
def test_an_export_of_the_weights_of_this_moment_passes(case: str, tmp_path: Path):
    dtype = torch.bfloat16 if "EP2" in case else torch.float32
    assert said(case, plain, tmp_path, dtype) == []


def test_tasks_are_kept_while_the_weights_change_and_move(tmp_path: Path):
    for case in ("biases, TP2 PP2", "experts EP2 PP2"):
        assert said(case, kept_tasks, tmp_path) == []


def test_tasks_that_hold_earlier_values_are_caught(tmp_path: Path):
    for case in ("biases, TP2 PP2", "experts EP2 PP2"):
        found = said(case, reused_tasks, tmp_path)
        assert len(found) == 2, "one owner per stage"
        assert all("does not yield the current weights" in text for text in found)


def test_one_stale_tensor_is_named(tmp_path: Path):
    (found,) = said("DP2", one_stale, tmp_path)
    assert "of 1 of " in found and "model.layers.0.self_attn.o_proj.weight" in found


def test_a_swapped_pair_of_equal_shape_is_named(tmp_path: Path):
    (found,) = said("DP2", swapped_pair, tmp_path)
    assert "of 2 of " in found
    assert "layers.0.self_attn.o_proj.weight" in found and "layers.1.self_attn.o_proj.weight" in found


def test_the_last_tensor_is_named_if_it_is_left_out(tmp_path: Path):
    """The live tensors are counted beside the export: those of what it leaves out, too."""
    (found,) = said("DP2", without_the_last, tmp_path)
    assert "of 1 of " in found and "lm_head.weight" in found


def _summed(rendezvous: Rendezvous, path: str) -> tuple[set[str], str]:
    """Ends of the names whose words were summed, and what the check says of an export that should have changed all."""
    join(rendezvous, layout(1, {}).megatron, seed=1)
    model = build_model(path, layout(1, {}).megatron, torch.float32, trainable=False)
    sums, summed, add = LiveSums(model), set[int](), WordSums.add

    def noted(self: WordSums, position: int, tensor: Tensor, word_bytes: int | None = None) -> None:
        summed.add(position % len(sums.tasks))
        add(self, position, tensor, word_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WordSums, "add", noted)
        for _ in sums.checked(export(model, torch.float32), torch.float32):
            pass
    names = {sums.tasks[position].live.local_name for position in summed}
    try:
        for _ in sums.checked(export(model, torch.float32), torch.float32, lambda tensor: tensor.detach() * 2):
            pass
    except WeightSyncError as error:
        return names, str(error)
    return names, ""


def test_memory_of_the_model_itself_needs_no_sums_unless_it_should_have_been_changed(tmp_path: Path):
    """Of a process alone only fused rows, which interleave heads, are copied; all should be merged with adapters."""
    ((names, said_of_changed),) = run_on_ranks(_summed, str(_source("qwen2", tmp_path)), 1, timeout_s=120)
    assert names and all("linear_qkv" in name for name in names)
    assert "does not yield the current weights" in said_of_changed and "model.embed_tokens.weight" in said_of_changed


@pytest.mark.parametrize(("exported", "name"), [(a_shard_twice, "embed_tokens"), (a_shard_alone, "layers.0.*_proj")])
def test_a_shard_that_stands_for_the_whole_is_caught(exported: Plan, name: str, tmp_path: Path):
    (found,) = said("tied, padded vocabulary, TP2", exported, tmp_path)
    assert re.search(rf"{name}.weight", found)
