"""Quick imports leave the collector and the libraries as they were; spawned processes begin with what they are told."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path

import pytest

from skyrl_train.imports import first_in_children, quick_imports


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


def test_spawned_processes_import_what_they_are_told_and_not_this_program(library: str, tmp_path: Path):
    said = tmp_path / "said"
    (tmp_path / f"{library}.py").write_text(f"open({str(said)!r}, 'a').write(__name__ + ' ')\n")
    (tmp_path / "program.py").write_text(
        f"open({str(said)!r}, 'a').write('program ')\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing, sys\n"
        "    from skyrl_train.imports import first_in_children\n"
        "    start = multiprocessing.get_context('spawn').Process\n"
        f"    with first_in_children({library!r}):\n"
        "        one = start(target=print)\n"
        "        one.start(), one.join()\n"
        "    two = start(target=print)\n"
        "    two.start(), two.join()\n"
    )
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=60)
    assert said.read_text().split() == ["program", "__mp_main__", "program"]


def test_the_main_module_is_back_whatever_happens():
    main = sys.modules["__main__"]
    with pytest.raises(ArithmeticError), first_in_children("json"):
        assert spawn.get_preparation_data("a child")["init_main_from_name"] == "json"
        raise ArithmeticError
    assert sys.modules["__main__"] is main
