"""Over three syncs with training between them, a running engine stays bit for bit what a fresh one on the export is.

These cases cover each kind of model, way of cutting it, dtype and transport; `scripts/sync_matrix.py` runs all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.engine_host import engine_host
from tests.support.sync_proof import SYNCS, Case, Round, prove, write_kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CASES = [
    Case("dense tied", "PP2", "float32", "broadcast"),
    Case("dense untied", "TP2", "float32"),
    Case("GLM experts", "PP2", "bfloat16"),
    Case("latent attention", "EP2", "bfloat16", "broadcast"),
    Case("latent attention", "PP2", "float32"),
    Case("GLM latent attention", "PP2", "bfloat16"),
    Case("dense tied LoRA", "PP2", "float32"),
    Case("experts LoRA", "EP2", "bfloat16"),
    Case("dense tied", "PP2", "fp8"),
    Case("dense untied", "TP2", "fp8", "broadcast"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hosts")
    with engine_host(folder, "synced") as synced, engine_host(folder, "fresh") as fresh:
        yield synced, fresh


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_all_logprobs_equal_those_of_a_fresh_engine(case: Case, hosts: tuple[str, str], tmp_path: Path):
    rounds = prove(case, *hosts, write_kind(case.kind, tmp_path / "source"), tmp_path)
    assert len(rounds) == SYNCS
    for number, one in enumerate(rounds):
        assert differences(one) == [], f"after sync {number + 1}"
    for one, later in pairwise(rounds):
        assert all(a[1] != b[1] for a, b in zip(one.fresh, later.fresh, strict=True)), "training changed nothing"


def differences(one: Round) -> list[str]:
    """A sentence for each request that was answered otherwise."""
    assert len(one.synced) == len(one.fresh) and all(len(rows) > 0 for _, rows in one.fresh)
    return [
        f"request {number}: tokens {mine[0]} and {theirs[0]}"
        for number, (mine, theirs) in enumerate(zip(one.synced, one.fresh, strict=True))
        if mine != theirs
    ]
