"""Who may import whom, and that each heavy package is imported in its own folder only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "skyrl_train"
# Who may import whom. A room (folder or module) comes after all that it may import, so there is no cycle.
MAY_IMPORT = {
    # nouns and the machine
    "types": "",
    "faults": "types",
    "spelling": "",
    "cancellation": "",
    "imports": "spelling",
    "algorithms": "imports spelling",
    "config": "algorithms spelling",
    "device": "",
    "file_sum": "",
    "ranks": "types",
    "stores": "ranks",
    # what can be known without a process of Megatron or Ray; of engines, what checks read imports no vLLM
    "kernels": "",
    "envs": "faults imports",
    "weight_sync": "device imports stores kernels",
    "hf": "config",
    "tracking": "types cancellation config imports",
    "engines": "types config device imports ranks hf weight_sync",
    "checks": "config imports algorithms hf weight_sync engines spelling",
    "data": "types config imports",
    "batching": "types faults algorithms",
    "rollout": "types faults cancellation config tracking data envs",
    # the heaviest package; it knows no engine, and no engine knows it
    "megatron": "types config device file_sum ranks stores algorithms kernels hf batching weight_sync",
    # processes: ranks are named to them as text (module:class), so cluster imports no Megatron
    "cluster": "types cancellation config device imports file_sum ranks stores algorithms hf weight_sync engines",
    # what a run will take; Megatron's and the engines' own rules, without their packages
    "forecast": "config device ranks algorithms checks hf engines megatron cluster",
    # the driver
    "trainer": (
        "types cancellation config file_sum ranks algorithms hf weight_sync tracking data batching rollout cluster"
    ),
    "service": (
        "types faults config algorithms spelling hf weight_sync tracking checks data batching rollout cluster forecast "
        "trainer"
    ),
    # where everything is put together
    "tasks": "config",
    "entrypoints": (
        "types faults config device imports ranks hf tracking checks data rollout megatron cluster forecast trainer "
        "service"
    ),
    "api": "config spelling entrypoints",
    # names of skyrl_train 0.4, over all of it
    "compat": "types faults algorithms config envs hf checks data rollout cluster trainer entrypoints",
}
HOW_TO_MEND = (
    "Move what both need into a room that both may import, or hand it in as an argument. If the arrow should exist, "
    "add it to MAY_IMPORT in tests/cpu/test_layers.py and to the table in docs/architecture.md, and say why."
)
ONLY_IN = {
    "ray": {"cluster", "service", "entrypoints"},
    "vllm": {"engines"},
    "triton": {"kernels"},
    "megatron": {"megatron"},
    "mbridge": {"megatron"},
}
FILES = sorted(
    path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.parent != ROOT or path.name != "__init__.py"
)


def imported(source: str) -> set[str]:
    """Dotted names of every absolute import, also those inside functions; `from a import b` gives `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def neighbours(file: Path) -> dict[str, str]:
    """The other rooms that a file imports from, each with a name that it takes there."""
    names = (name.split(".") for name in imported((ROOT / file).read_text()))
    found = {parts[1]: ".".join(parts) for parts in names if parts[0] == "skyrl_train" and len(parts) > 1}
    return {other: name for other, name in found.items() if other != room(file)}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_from_rooms_that_its_own_may_import(file: Path):
    own = room(file)
    assert own in MAY_IMPORT, f"say what {own} may import: {HOW_TO_MEND}"
    for other, name in neighbours(file).items():
        assert other in MAY_IMPORT[own].split(), (
            f"{file} imports {name}, and {own} may not import {other}. {HOW_TO_MEND}"
        )
    for name in imported((ROOT / file).read_text()):
        package = name.partition(".")[0]
        assert own in ONLY_IN.get(package, {own}), f"{file} imports {name}: only {sorted(ONLY_IN[package])} may"


def test_every_room_comes_after_what_it_may_import():
    above: list[str] = []
    for own, others in MAY_IMPORT.items():
        assert not (later := set(others.split()) - set(above)), f"{own} may import {later}, which come after it"
        above.append(own)


def test_every_allowed_arrow_exists():
    arrows = {(room(file), other) for file in FILES for other in neighbours(file)}
    allowed = {(own, other) for own, others in MAY_IMPORT.items() for other in others.split()}
    assert not (unused := allowed - arrows), f"delete from MAY_IMPORT what nothing uses any more: {sorted(unused)}"


def test_the_architecture_page_says_the_same():
    """Its table has one row for each room, or for several that may import the same."""
    documented: dict[str, str] = {}
    for line in (REPOSITORY / "docs/architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            names = re.findall(r"`(\w+)(?:/|\.py)`", cells[0])
            documented |= dict.fromkeys(names, cells[2])
            packages = {package for package, rooms in ONLY_IN.items() if rooms & set(names)}
            assert set(re.findall(r"`(\w+)`", cells[3])) == packages, line
    assert documented == MAY_IMPORT


def test_the_check_sees_imports_inside_functions_and_of_single_names():
    assert imported("def f():\n    import ray.util\n    from skyrl_train import device") == {
        "ray.util",
        "skyrl_train.device",
    }


FOLDERS = sorted({file.parent for file in FILES})


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_holds_at_most_fourteen_files_and_says_what_it_knows(folder: Path):
    files = [file for file in (ROOT / folder).glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= 14
    assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
