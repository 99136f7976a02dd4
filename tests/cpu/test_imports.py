"""Quick imports leave the collector and the libraries as they were; spawned processes begin as configured."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skyrl_train.checks.engines import ENGINE_ARGUMENTS
from skyrl_train.checks.training import TRANSFORMER_CONFIG
from skyrl_train.imports import (
    declared_fields,
    imported,
    megatron_imports,
    quick_imports,
    require_unedited,
    require_working_torchvision,
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that nobody has imported."""
    (tmp_path / "large_library.py").write_text("import gc\nCOLLECTED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large_library", raising=False)
    return "large_library"


def test_nothing_is_collected_while_libraries_are_imported(library: str):
    with quick_imports():
        module = importlib.import_module(library)
    assert not module.COLLECTED and gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as tests/cpu/conftest.py does


@pytest.mark.usefixtures("thawed")
def test_only_what_imports_made_is_not_looked_at_any_more(library: str):
    with quick_imports():
        pass
    assert gc.get_freeze_count() == 0
    with quick_imports():
        importlib.import_module(library)
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("thawed")
def test_what_a_program_leaves_between_its_imports_is_collected_after_them(
    library: str, monkeypatch: pytest.MonkeyPatch
):
    class Engine: ...

    with quick_imports():
        importlib.import_module(library)
    monkeypatch.delitem(sys.modules, library)
    engine = Engine()
    engine.itself = engine  # type: ignore[attr-defined]
    left = weakref.ref(engine)
    del engine
    with quick_imports():
        importlib.import_module(library)
    gc.collect()
    assert left() is None


@pytest.mark.usefixtures("thawed")
def test_an_import_that_fails_leaves_collector_and_libraries_as_they_were(library: str):
    with pytest.raises(ImportError), quick_imports(without=(library,)):
        importlib.import_module(library)
    assert gc.isenabled() and importlib.import_module(library)


def test_libraries_that_are_not_wanted_cannot_be_imported_for_a_while(library: str):
    with quick_imports(without=(library, "json")):
        with pytest.raises(ImportError):
            importlib.import_module(library)
        importlib.import_module("json")  # was there before
    assert importlib.import_module(library)


COMPILED = """
import torch
@torch.compile
def plain(x): return x + 1
@torch.compile(dynamic=True)
def with_options(x): return x + 2
"""


def test_functions_are_compiled_at_their_first_call_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fused_functions.py").write_text(COMPILED)
    monkeypatch.syspath_prepend(tmp_path)
    decorated: list[tuple[str, dict[str, bool]]] = []

    def compile_now(function: Callable[[int], int], **options: bool) -> Callable[[int], int]:
        decorated.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)
    try:
        with megatron_imports():
            module = importlib.import_module("fused_functions")
    finally:
        sys.modules.pop("fused_functions", None)
    assert torch.compile is compile_now and not decorated
    assert [module.plain(1), module.plain(2), module.with_options(1), module.with_options(2)] == [2, 3, 3, 4]
    assert decorated == [("plain", {}), ("with_options", {"dynamic": True})]
    assert module.plain.__name__ == "plain"


@pytest.mark.slow
def test_a_rank_imports_megatron_without_inductor():
    program = """
import sys
from skyrl_train.imports import megatron_imports
with megatron_imports():
    import skyrl_train.megatron.policy
sys.exit("torch._inductor.lowering" in sys.modules or "wandb" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_torchvision_for_another_torch_is_one_error_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in raises what PyPI's build for CUDA raises beside the CPU build of torch."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(ValueError, match=r"nms does not exist\): its build .* Run `pip uninstall torchvision"):
        require_working_torchvision()


def test_a_machine_without_torchvision_is_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    require_working_torchvision()


@pytest.mark.parametrize(
    ("names", "complete"),
    [(ENGINE_ARGUMENTS, ENGINE_ARGUMENTS[1]), (TRANSFORMER_CONFIG, TRANSFORMER_CONFIG[1])],
    ids=["vllm", "megatron"],
)
def test_fields_read_from_a_source_are_those_of_the_class(names: tuple[str, ...], complete: str):
    module, _, name = complete.partition(":")
    fields = dataclasses.fields(getattr(importlib.import_module(module), name))
    assert declared_fields(*names) == {field.name for field in fields}


def test_fields_are_unknown_without_the_package_or_a_class_of_the_hierarchy():
    assert declared_fields("no_such_package.module:Class") == frozenset()
    assert declared_fields(TRANSFORMER_CONFIG[1]) == frozenset(), "its base class is not named"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's module that this process has imported."""
    (file := tmp_path / "own_code.py").write_text("def first(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    imported("a.key", "own_code:first")
    return file


def test_a_module_that_was_edited_after_its_import_is_refused_until_it_is_read_again(own: Path):
    require_unedited("own_code")
    own.write_text("def first(): ...\n")  # a cell that writes it runs again
    require_unedited("own_code")
    own.write_text("def first(): ...\ndef second(): ...\n")
    for use in (lambda: require_unedited("own_code"), lambda: imported("a.key", "own_code:second")):
        with pytest.raises(ValueError, match=r"own_code \(.*own_code\.py\) was edited after .* Restart the kernel"):
            use()
    assert imported("a.key", "own_code:first"), "a run that has begun continues with the code that it has"
    importlib.reload(sys.modules["own_code"])
    require_unedited("own_code")
    assert imported("a.key", "own_code:second")


def test_a_module_without_a_file_or_that_nobody_named_counts_as_unedited():
    imported("a.key", "sys:path")
    for name in ("sys", "no_such_module"):
        require_unedited(name)
