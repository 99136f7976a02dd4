"""Imports go one way, and each heavy package is imported in its own folder only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "skyrl_train"
# A folder or module imports only what stands before it; the modules of one row may import each other.
ROWS = """
    config
    types ranks hf device nvml imports file_sum stores
    tracking
    algorithms
    checks
    data
    envs
    rollout
    batching
    kernels
    weight_sync
    megatron
    engines
    cluster
    trainer
    service
    tasks
    entrypoints
"""
LAYER = {name: number for number, row in enumerate(ROWS.split("\n")) for name in row.split()}
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


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_what_stands_before_its_folder(file: Path):
    own = file.parts[0].removesuffix(".py")
    assert own in LAYER, f"say where {own} stands in ROWS"
    for name in imported((ROOT / file).read_text()):
        package, *rest = name.split(".")
        if package == "skyrl_train":
            assert LAYER[rest[0]] <= LAYER[own], f"{file} imports {name}"
        assert own in ONLY_IN.get(package, {own}), f"{file} imports {name}"


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
