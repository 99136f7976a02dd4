"""Random rows and jobs, with kept seeds: the first cases of `python -m tests.support.fuzz_rows`, and what failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.support.fuzz_rows import make, run_case

FIRST = range(200)
FAILED_ONCE = (10, 168, 775, 980, 1478)
"""Cases with which defects were found: errors of any length, and text that cannot be encoded."""


@pytest.fixture(scope="module")
def made() -> Any:
    return make()


@pytest.mark.parametrize("tens", range(len(FIRST) // 10))
def test_a_random_row_or_job_is_loaded_within_its_limits_or_refused_with_its_place(
    tens: int, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for seed in FIRST[10 * tens : 10 * tens + 10]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_case(seed, folder, *made)


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_a_case_that_failed_once_no_longer_does(seed: int, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run_case(seed, tmp_path, *made)
