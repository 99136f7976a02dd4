"""Processes that are forked from this one: their results, threads, failures and deadline."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous


def ranks_and_argument(rendezvous: Rendezvous, argument: Any) -> tuple[int, int, Any]:
    return rendezvous.rank, rendezvous.world_size, argument


def find_on_threads(rendezvous: Rendezvous, argument: Any) -> list[str]:
    """The errors of threads whose first operation on tensors is at the same time."""
    start, errors = threading.Event(), []

    def find() -> None:
        start.wait()
        try:
            torch.nonzero(argument)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    start.set()
    for thread in threads:
        thread.join()
    return errors


def fail_on_rank_1(rendezvous: Rendezvous, argument: Any) -> None:
    if rendezvous.rank == 1:
        raise ValueError("no such layer")
    time.sleep(60)


def never_end(rendezvous: Rendezvous, argument: Any) -> None:
    time.sleep(60)


def test_results_come_by_rank():
    assert run_on_ranks(ranks_and_argument, {"a": 1}, 2, timeout_s=60) == [(0, 2, {"a": 1}), (1, 2, {"a": 1})]


def test_threads_of_a_forked_process_use_tensors_at_once():
    torch.set_num_threads(1)
    torch.get_num_threads()  # this thread is then ready, as after any larger operation, and torch resets nothing
    mask = torch.arange(64) % 2 == 0
    for _ in range(5):  # 19 of 20 processes fail if torch's pool stays as the fork left it
        assert run_on_ranks(find_on_threads, mask, 1, timeout_s=60) == [[]]


def test_the_first_failure_ends_the_other_ranks():
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="(?s)rank 1 failed.*no such layer"):
        run_on_ranks(fail_on_rank_1, None, 2, timeout_s=50)
    assert time.monotonic() - began < 50


def test_ranks_that_do_not_end_are_stopped():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] of 2 did not end within 0.5 s"):
        run_on_ranks(never_end, None, 2, timeout_s=0.5)
