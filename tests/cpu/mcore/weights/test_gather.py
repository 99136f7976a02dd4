"""Ranks exchange plain data without unpickling it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import load_config
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.weights.gather import gather_bytes, gather_json
from skyrl_train.ranks import Rendezvous

ROOT = Path(__file__).parents[4] / "skyrl_train"
UNPICKLES = ("pickle", "cloudpickle", "dill")


def unpickled(source: str) -> list[int]:
    """Lines that unpickle: collectives of objects, modules of pickles, and torch.load of more than weights."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
        called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        only_weights = isinstance(node, ast.Call) and any(
            keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
        is_torch_load = called == "load" and ast.unparse(node).startswith("torch.load(")
        is_object = called.endswith(("_object", "_object_list"))
        if names & {*UNPICKLES} or is_object or (is_torch_load and not only_weights):
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def test_nothing_that_arrives_from_another_process_is_unpickled():
    found = {str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if unpickled(file.read_text())}
    assert found == {"megatron/verify/local_ranks.py"}, "files that processes of its own have just written"


@pytest.mark.parametrize(
    "line", ["dist.all_gather_object(a, b)", "import pickle", "from cloudpickle import loads", "torch.load(file)"]
)
def test_the_check_sees_what_unpickles(line: str):
    assert unpickled(line) == [1] and unpickled("torch.load(file, weights_only=True)") == []


def exchange(rendezvous: Rendezvous, config: Any) -> tuple[list[Any], list[bytes], list[bytes]]:
    join(rendezvous, config, seed=0)
    rank = rendezvous.rank
    return (
        gather_json({"names": ["ä"] * rank, "pair": (rank, None)}),
        gather_bytes(b"\x00\x80" * rank),
        gather_bytes(b""),
    )


@pytest.mark.slow
def test_each_rank_has_what_every_rank_gives_whatever_its_length():
    objects = [{"names": ["ä"] * rank, "pair": [rank, None]} for rank in range(3)]
    expected = objects, [b"", b"\x00\x80", b"\x00\x80\x00\x80"], [b"", b"", b""]
    assert run_on_ranks(exchange, load_config().trainer.policy.megatron_config, 3, timeout_s=60) == [expected] * 3
