"""Transformer Engine needs a GPU: modules with its names stand for it, as they are in 2.20."""

from __future__ import annotations

import functools
import sys
import types
import weakref

import pytest
import torch

from skyrl_train.megatron.residency.memory import free_te_scratch


def test_what_transformer_engine_keeps_is_forgotten_and_made_again(monkeypatch: pytest.MonkeyPatch):
    names = ("module.base", "cpp_extensions.gemm")
    base, products = (types.ModuleType(f"transformer_engine.pytorch.{name}") for name in names)
    for module in (base, products):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    base._dummy_wgrads = {(8, 8): torch.empty(8, 8)}  # type: ignore[attr-defined]

    @functools.cache
    def get_cublas_workspace(device: int, ub: bool, grouped_gemm: bool) -> torch.Tensor:
        return torch.empty(32)

    products.get_cublas_workspace = get_cublas_workspace  # type: ignore[attr-defined]
    kept = [weakref.ref(get_cublas_workspace(0, False, False)), weakref.ref(base._dummy_wgrads[8, 8])]
    free_te_scratch()
    assert [one() for one in kept] == [None, None]
    assert get_cublas_workspace(0, False, False).numel() == 32


def test_without_it_there_is_nothing_to_forget():
    free_te_scratch()
