"""Weights through NCCL when a process is lost: nobody waits on the device for what does not come, nor ends with it."""

from __future__ import annotations

import pytest

from tests.support.lost_peers import lose_receiver, lose_sender

pytestmark = pytest.mark.gpus(2)
SENDER, RECEIVER = "cuda:0", "cuda:1"


@pytest.fixture(params=["NVLink", "sockets"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Between GPUs that reach each other's memory NCCL notices no loss at all; over a network it reports one, upon
    which torch's watchdog ends the process, here at once."""
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")
    if request.param == "sockets":
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
        monkeypatch.setenv("NCCL_NET", "Socket")
    return request.param


@pytest.mark.parametrize("is_killed", [False, True], ids=["gives up", "is killed"])
def test_a_receiver_that_reads_on_the_host_notices_a_dead_sender_and_continues_with_the_next(is_killed: bool, way: str):
    said = lose_sender(SENDER, RECEIVER, is_killed)
    assert any(words in said for words in ("gave up this weight update", "died during", "failed")), said


@pytest.mark.usefixtures("way")
def test_a_sender_that_reads_what_it_sends_notices_a_dead_receiver_and_continues_with_the_next():
    assert lose_receiver(SENDER, RECEIVER) == "the engine died"
