"""Stores of process groups listen where they are needed and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from skyrl_train.cluster.ranks.rank import Rank
from skyrl_train.config import load_config
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous, free_port
from skyrl_train.stores import join_store, listen, serve_store
from skyrl_train.weight_sync.channels.broadcast import BroadcastSendChannel
from tests.support.fake_actors import FakeEngine, FakeRank, engine_pool, policy_group
from tests.support.settings import remote_settings


def listening() -> set[tuple[str, int]]:
    """Address and port of each socket at which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_a_store_listens_on_its_address_alone():
    before = listening()
    store = serve_store(listen("127.0.0.1"), "127.0.0.1", timeout_s=10)
    assert listening() - before == {("127.0.0.1", store.port)}


def test_a_sender_of_weights_listens_on_its_address_alone():
    before = listening()
    channel = BroadcastSendChannel(1, torch.device("cpu"), 10, "127.0.0.1")
    assert listening() - before == {("127.0.0.1", channel.init_info["port"])}
    channel.close()


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_nobody_can_take_the_port_of_a_group_before_its_store_serves_there():
    listening = listen("127.0.0.1")
    port = listening.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", port)
    rendezvous = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=port, timeout_s=10, listening=listening)
    join_store(rendezvous).set("a", "b")


def test_ranks_do_not_wait_for_a_store_that_rank_0_could_not_serve():
    rank = Rank()
    address, port = rank.listen(on_one_node=True)
    rendezvous = Rendezvous(rank=0, world_size=2, address=address, port=port, timeout_s=10)
    with socket.create_connection((address, port), timeout=10) as other:  # as another rank does
        with pytest.raises(TypeError):
            rank.build("skyrl_train.megatron.policy:MegatronPolicy", rendezvous, {"unknown": 1})
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b"", "its connection was closed"


def test_the_store_of_one_rank_waits_for_nobody():
    join_store(Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=free_port(), timeout_s=10)).set("a", "b")


@pytest.mark.parametrize(("other", "address"), [("node", "127.0.0.1"), ("another node", "host")])
def test_ranks_of_one_node_meet_on_loopback_and_others_at_the_nodes_address(
    monkeypatch: pytest.MonkeyPatch, other: str, address: str
):
    ranks = [FakeRank(), FakeRank()]
    ranks[1].answers["find_place"] = (other, 8, "")
    met: list[Rendezvous] = []
    place = ranks[0].answers["build"]
    for rank in ranks:
        rank.answers["build"] = lambda entry_point, meeting, kwargs: met.append(meeting) or place
    asyncio.run(policy_group(monkeypatch, *ranks))
    assert {meeting.address for meeting in met} == {address}


def test_senders_know_the_nodes_of_the_runs_own_engines_and_of_no_others(monkeypatch: pytest.MonkeyPatch):
    async def nodes() -> list[set[str] | None]:
        pool = engine_pool(monkeypatch, FakeEngine(), FakeEngine())
        own = pool.nodes
        pool.replicas[1].settings = remote_settings("url", None, "model", "float32", 64, "broadcast")
        return [own, pool.nodes]

    assert asyncio.run(nodes()) == [{"node"}, None]


def join_and_look(rendezvous: Rendezvous, config: Any) -> tuple[set[tuple[str, int]], float]:
    join(rendezvous, config, seed=0)
    total = torch.ones(1)
    dist.all_reduce(total)
    return listening(), total.item()


@pytest.mark.slow
def test_ranks_open_nothing_on_all_networks_of_their_host():
    results = run_on_ranks(join_and_look, load_config().trainer.policy.megatron_config, 2, timeout_s=60)
    assert [total for _, total in results] == [2.0, 2.0]
    assert not {address for found, _ in results for address, _ in found} & {"0.0.0.0", "::"}
    assert any(address == "127.0.0.1" for address, _ in results[0][0])
