"""Placement, calls of many actors at once, and leaving no trace, on one small local Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.util import placement_group_table

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.gpu_kind import KIND, cluster_gpu_kind
from skyrl_train.cluster.launch import launch
from skyrl_train.cluster.placement import Demand, Placement, PlacementError
from skyrl_train.cluster.pool import replica
from skyrl_train.cluster.pool.replica import EngineReplica
from skyrl_train.cluster.process import Host, host
from skyrl_train.cluster.ranks.worker_group import RANK, WorkerGroup
from skyrl_train.cluster.session import CPU_ENVIRONMENT, Cluster, connect, cpu_environment, worker_environment
from skyrl_train.config import load_config
from skyrl_train.device.kinds import DeviceKind, device_kind
from skyrl_train.hf.hub import local_folder
from skyrl_train.ranks import Rendezvous
from skyrl_train.service import client
from skyrl_train.trainer.from_config import objective
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.local_hub import COMMIT
from tests.support.settings import engine_settings

pytestmark = pytest.mark.slow
NUM_CPUS = 2
SETTINGS = engine_settings("model", "name", "float32", max_model_len=64)


class Member:
    """An actor that follows its script."""

    def answer(self, value: int) -> int:
        return value

    def fail(self, text: str) -> None:
        raise ArithmeticError(text)

    def lose_a_peer(self, file: Path) -> None:
        file.touch()
        raise RuntimeError("Connection reset by peer")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, file: Path) -> None:
        while not file.exists():
            time.sleep(0.02)

    def process(self) -> int:
        return os.getpid()

    def fail_in(self, other: Any) -> None:
        ray.get(other.fail.remote("first of all"))

    def ask(self, other: Any) -> None:
        ray.get(other.answer.remote(1))

    def init_weight_sync(self, info: dict[str, Any]) -> None:
        from skyrl_train.weight_sync.channels.broadcast import BroadcastReceiveChannel

        BroadcastReceiveChannel(info, 0, torch.device("cpu"), info["weight_sync_timeout_s"])


def on_sigterm(number: int, frame: object) -> None:
    """The handler of a program that connects."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    init = ray.init
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, on_sigterm))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RAY_ADDRESS", *CPU_ENVIRONMENT):  # or all processes would inherit what conftest.py sets
                patch.delenv(name, raising=False)
            patch.setattr(
                "ray.init", lambda **arguments: init(**arguments, num_cpus=NUM_CPUS, resources={f"{KIND}H200": 1})
            )
            joined = stack.enter_context(connect())
        yield joined


@pytest.fixture(scope="module")
def members(cluster: Cluster) -> list[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
    actor = ray.remote(Member)
    return [actor.options(num_cpus=0).remote() for _ in range(3)]


@pytest.fixture
def calls() -> Calls:
    return Calls(("policy-0", "policy-1", "policy-2"), timeout_s=60, log_folder="runs/x/logs")


def demand(count: int) -> list[Demand]:
    return [Demand("policy ranks", count, 1), Demand("engines", 1, 1)]


async def placed(count: int, cpus_each: float, timeout_s: float = 30) -> Placement:
    config = load_config([f"trainer.placement.cpus_per_worker={cpus_each}", f"trainer.placement.timeout_s={timeout_s}"])
    return await Placement.reserve(demand(count), config.trainer.placement, use_gpus=False)


def reserve(count: int, cpus_each: float, timeout_s: float = 30) -> Placement:
    return asyncio.run(placed(count, cpus_each, timeout_s))


def groups_held() -> int:
    """Placement groups that have room or wait for it."""
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def test_a_node_reports_the_kind_of_its_gpus(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    assert asyncio.run(cluster_gpu_kind(partial(device_kind, "NVIDIA H200"))) == device_kind("H200")
    assert asyncio.run(cluster_gpu_kind()) is None and not caplog.records, "the node has no driver"
    assert asyncio.run(cluster_gpu_kind(partial(int, "no number"))) is None  # type: ignore[arg-type]
    assert "the nodes did not report their GPUs" in caplog.text and "invalid literal for int()" in caplog.text


def test_a_node_that_is_asked_for_its_gpus_sees_them(cluster: Cluster):
    def seen() -> DeviceKind:
        kind = device_kind("NVIDIA H200")
        assert kind is not None
        return replace(kind, name=os.environ.get("CUDA_VISIBLE_DEVICES", "all"))

    found = asyncio.run(cluster_gpu_kind(seen))
    assert found is not None and found.name == "all"


def test_an_impossible_placement_fails_at_once_and_says_what_was_asked_and_what_there_is(cluster: Cluster):
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        reserve(3, cpus_each=100)
    assert time.monotonic() - started < 20, "it must not wait for the deadline (30 s)"
    message = str(caught.value)
    assert "3 policy ranks, 1 engines: together 400 CPUs" in message and "has 2 CPUs and 0 GPUs in all" in message
    assert "trainer.placement.cpus_per_worker" in message


def test_a_run_without_room_starts_no_process(cluster: Cluster, tmp_path: Path):
    config = load_config(["trainer.placement.cpus_per_worker=100", "trainer.algorithm.use_kl_loss=false"])
    goal = objective(config.trainer.algorithm, config.generator.sampling_params)
    started = launch(config, cluster, max_model_len=64, objective=goal, num_optimizer_steps=1, logs=str(tmp_path))
    with pytest.raises(PlacementError, match="1 policy ranks, 1 engines: together 200 CPUs.* the cluster has"):
        asyncio.run(started)
    assert groups_held() == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("nodes", "count", "gpus_each", "cpus_each", "expected"),
    [
        ([{"CPU": 1.0}, {"CPU": 1.0}], 1, 0, 1.5, "room for 0 of the 1 processes of 1.5 CPUs and 0 GPUs"),
        ([{"CPU": 8.0}, {"CPU": 1.0, "GPU": 4.0}], 3, 1, 0.5, "room for 2 of the 3 processes of 0.5 CPUs and 1 GPUs"),
        ([{"CPU": 8.0, "GPU": 1.0}] * 4, 1, 2, 1, "room for 0 of the 1 processes of 1 CPUs and 2 GPUs"),
    ],
    ids=["a wide process", "CPUs and GPUs on different nodes", "GPUs of an engine on different nodes"],
)
def test_processes_that_no_node_can_hold_are_refused_at_once(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[dict[str, float]],
    count: int,
    gpus_each: int,
    cpus_each: float,
    expected: str,
):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)
    config = load_config([f"trainer.placement.cpus_per_worker={cpus_each}", "trainer.placement.timeout_s=2"])
    demands = [Demand("policy ranks", count, gpus_each)]
    with pytest.raises(PlacementError, match=expected):
        asyncio.run(Placement.reserve(demands, config.trainer.placement, use_gpus=gpus_each > 0))


def test_a_busy_cluster_is_waited_for_until_the_deadline_and_the_place_is_given_back(cluster: Cluster):
    first = reserve(2, cpus_each=0.5)
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        reserve(1, cpus_each=1.0, timeout_s=1)
    assert 1 <= time.monotonic() - started < 20
    assert "within trainer.placement.timeout_s=1 s" in str(caught.value)
    assert "0.5 CPUs and 0 GPUs are free" in str(caught.value)
    assert groups_held() == 1
    first.remove()
    assert groups_held() == 0


def test_waiting_for_a_place_leaves_the_event_loop_free(cluster: Cluster):
    async def main() -> int:
        blocker = await placed(1, 1.0)
        waiting = asyncio.ensure_future(placed(1, 1.0, 60))
        turns = 0
        while turns < 20:
            await asyncio.sleep(0.01)
            turns += 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert groups_held() == 1
        blocker.remove()
        return turns

    assert asyncio.run(main()) == 20
    reserve(1, cpus_each=1.0).remove()


def test_slots_of_one_kind_are_as_many_as_asked(cluster: Cluster):
    placement = reserve(3, cpus_each=0.2)
    assert {name: len(slots) for name, slots in placement.slots.items()} == {"policy ranks": 3, "engines": 1}
    indexes = [slot.strategy.placement_group_bundle_index for slots in placement.slots.values() for slot in slots]
    assert sorted(indexes) == [0, 1, 2, 3]
    placement.remove()


def test_results_come_in_the_order_of_the_members(members: list[Any], calls: Calls):
    refs = [members[0].sleep.remote(0.3), members[1].answer.remote(1), members[2].answer.remote(2)]
    assert asyncio.run(calls.gather("answer", refs)) == [None, 1, 2]


def test_the_first_failure_is_raised_at_once_with_process_and_log(members: list[Any], calls: Calls, tmp_path: Path):
    """The others end only after it was raised."""
    waits = [members[n].wait_for.remote(tmp_path / "ended") for n in (0, 2)]
    with pytest.raises(RemoteFailed) as caught:
        asyncio.run(calls.gather("update", [waits[0], members[1].fail.remote("one"), waits[1]]))
    assert str(caught.value) == "policy-1 failed to update: ArithmeticError: one (log: runs/x/logs/policy-1.log)"
    (tmp_path / "ended").touch()
    ray.get(waits)


def test_a_failure_inside_a_call_of_another_process_is_reported_without_ray(members: list[Any], calls: Calls):
    with pytest.raises(RemoteFailed) as caught:
        asyncio.run(calls.gather("sync", [members[0].fail_in.remote(members[1])]))
    assert str(caught.value) == "policy-0 failed to sync: ArithmeticError: first of all (log: runs/x/logs/policy-0.log)"


def test_a_member_that_does_not_answer_is_named_at_the_deadline(members: list[Any], tmp_path: Path):
    calls = Calls(("a", "b"), timeout_s=0.5, log_folder="logs")
    answered, never = members[0].answer.remote(1), members[1].wait_for.remote(tmp_path / "ended")
    ray.wait([answered], timeout=60)
    with pytest.raises(RemoteFailed, match=r"^b did not update within 0.5 s \(logs: logs\)$"):
        asyncio.run(calls.gather("update", [answered, never]))
    (tmp_path / "ended").touch()
    ray.get(never)


def test_a_dead_process_is_named_and_not_the_one_that_notices_first(
    members: list[Any], calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_train.cluster.calls.DEATH_S", 60)
    noticed, victim = tmp_path / "noticed", ray.remote(Member).options(num_cpus=0).remote()  # type: ignore[attr-defined]
    pid = ray.get(victim.process.remote())

    async def main() -> None:
        refs = [members[0].lose_a_peer.remote(noticed), members[1].wait_for.remote(tmp_path / "ended")]
        waiting = asyncio.ensure_future(calls.gather("update", [*refs, victim.sleep.remote(600)]))
        while not noticed.exists():
            await asyncio.sleep(0.02)
        await asyncio.wait([waiting], timeout=0.5)
        os.kill(pid, signal.SIGKILL)
        await waiting

    with pytest.raises(RemoteFailed, match="^policy-2 died when asked to update: its process crashed") as caught:
        asyncio.run(main())
    (tmp_path / "ended").touch()
    death = caught.value.__cause__
    assert death is not None
    address = host()
    monkeypatch.setattr("skyrl_train.cluster.calls.host", lambda: "another node's")
    message = calls.describe("policy-2", "update", death)
    assert f"update: node {address} failed, or the process there crashed or was killed (log" in message
    monkeypatch.setattr("skyrl_train.cluster.calls.DEATH_S", 0.1)
    with pytest.raises(RemoteFailed, match="^policy-0 failed to update: RuntimeError: Connection reset by peer"):
        asyncio.run(calls.gather("update", [members[0].lose_a_peer.remote(noticed), members[1].sleep.remote(3)]))


def test_a_killed_member_is_noticed_within_seconds(members: list[Any], calls: Calls, tmp_path: Path):
    """Kills the last member, so it is the last of those that use it."""
    pid = ray.get(members[2].process.remote())
    refs = [members[0].wait_for.remote(tmp_path / "ended"), members[2].sleep.remote(600)]

    async def main() -> None:
        waiting = asyncio.ensure_future(calls.gather("update", refs, [0, 2]))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        await waiting

    started = time.monotonic()
    with pytest.raises(RemoteFailed, match="policy-2 died when asked to update"):
        asyncio.run(main())
    assert time.monotonic() - started < 30
    (tmp_path / "ended").touch()
    with pytest.raises(RemoteFailed) as caught:
        asyncio.run(calls.gather("sync", [members[1].ask.remote(members[2])], [1]))
    assert str(caught.value) == (
        "policy-1 failed to sync: a process that it called crashed or was killed (log: runs/x/logs/policy-1.log)"
    )


def test_processes_with_gpus_get_none_of_the_cpus_environment_from_a_driver_without(cluster: Cluster, tmp_path: Path):
    async def body() -> list[dict[str, str]]:
        place = await placed(2, 0.5)
        first, second = place.slots["policy ranks"]
        third = place.slots["engines"][0]
        group = WorkerGroup("policy", [first, replace(second, uses_gpus=True)], str(tmp_path), timeout_s=60)
        calls = Calls(("engine-0",), 60, str(tmp_path))
        engine = EngineReplica(0, calls, replace(third, uses_gpus=True), SETTINGS, max_restarts=0)
        try:
            refs = [one.__ray_call__.remote(lambda _: dict(os.environ)) for one in (*group.actors, engine.actor)]
            return await asyncio.wait_for(asyncio.gather(*refs), 60)
        finally:
            ray.kill(engine.actor)
            await group.shutdown()
            place.remove()

    without, *others = asyncio.run(body())
    assert without.items() >= CPU_ENVIRONMENT.items()
    for environment in others:
        assert "TORCHDYNAMO_DISABLE" not in environment and environment["RAY_DEDUP_LOGS"] == "0"


def test_a_rank_on_the_drivers_node_finds_the_model_that_the_driver_has_downloaded(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`ray start` was called without the driver's HF_HOME."""
    model = tmp_path / "hub/models--org--policy/snapshots" / COMMIT
    model.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    async def body() -> str:
        place = await placed(1, 0.5)
        slot = place.slots["policy ranks"][0]
        assert "HF_HUB_CACHE" not in replace(slot, node="another").options()["runtime_env"]["env_vars"]
        group = WorkerGroup("policy", [slot], str(tmp_path), timeout_s=60)
        try:
            return await group.actors[0].__ray_call__.remote(lambda _: local_folder(f"org/policy@{COMMIT}"))
        finally:
            await group.shutdown()
            place.remove()

    assert asyncio.run(body()) == str(model)


def test_a_rank_that_cannot_import_a_custom_module_names_it_before_anything_is_built(cluster: Cluster, tmp_path: Path):
    async def body() -> None:
        place = await placed(1, 0.5)
        slots = place.slots["policy ranks"]
        group = WorkerGroup("policy", slots, str(tmp_path), 60, custom_modules=("json", "no_such_module"))
        try:
            await group.build("no.such.module:Class", {})
        finally:
            await group.shutdown()
            place.remove()

    with pytest.raises(RemoteFailed) as caught:
        asyncio.run(body())
    assert str(caught.value).startswith(
        "policy-0 failed to run import_modules: ValueError: trainer.custom_modules names no_such_module, which cannot "
        "be imported (ModuleNotFoundError: "
    )


def test_what_the_job_sets_is_left_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert worker_environment()["RAY_DEDUP_LOGS"] == "0"
    env_vars = {"OMP_NUM_THREADS": "4", "RAY_DEDUP_LOGS": "1"}
    job = json.dumps({"runtime_env": {"env_vars": env_vars, "working_dir": "gcs://x.zip"}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    assert worker_environment() == {"TOKENIZERS_PARALLELISM": "false"}
    context = SimpleNamespace(runtime_env={"env_vars": env_vars})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    assert cpu_environment() == {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_the_handlers_of_signals_are_those_from_before(cluster: Cluster):
    """Ray's own SIGTERM handler exits on the spot."""
    assert signal.getsignal(signal.SIGTERM) is on_sigterm


def test_a_local_cluster_has_no_process_that_a_run_does_not_use(cluster: Cluster):
    commands = _processes_of(ray.get_runtime_context().get_session_name())
    assert commands, "not even the raylet"
    assert not [command for command in commands if re.search(r"dashboard\.py|monitor\.py", command)]


class Waiting:
    """An actor whose calls end when it is told to."""

    def __init__(self) -> None:
        self._released = asyncio.Event()

    async def wait(self) -> None:
        await self._released.wait()

    async def ping(self) -> str:
        return "here"


@pytest.mark.parametrize("most", [replica.MAX_CONCURRENCY, client.MAX_CONCURRENCY], ids=["engine", "service"])
def test_an_actor_answers_behind_as_many_calls_as_a_large_run_keeps_waiting(most: int, cluster: Cluster):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(Waiting).options(num_cpus=0, max_concurrency=most).remote()
    try:
        waiting = [actor.wait.remote() for _ in range(2_000)]
        assert ray.get(actor.ping.remote(), timeout=60) == "here"
        assert not ray.wait(waiting, timeout=0)[0]
    finally:
        ray.kill(actor)


@pytest.mark.parametrize("joining", ["with s.connect(): pass", "s.attach(os.environ['RAY_ADDRESS'])"])
def test_a_program_without_the_token_of_a_cluster_is_asked_to_set_it(joining: str, cluster: Cluster):
    if os.environ.get("RAY_AUTH_MODE") != "token":
        pytest.skip("this version of Ray starts no cluster with a token")
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "RAY_NUM_REDIS_GET_RETRIES": "1"}
    del environment["RAY_AUTH_MODE"]
    program = [sys.executable, "-c", f"import os\nimport skyrl_train.cluster.session as s\n{joining}"]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert f"cluster at '{cluster.address}' refused this program's token. Set RAY_AUTH_MODE=token" in ended.stderr


def test_leaving_the_local_cluster_ends_its_processes(tmp_path: Path, cluster: Cluster):
    """The last test of the module: its cluster is gone afterwards."""
    session = ray.get_runtime_context().get_session_name()
    ray.shutdown()
    deadline = time.monotonic() + 15
    while (left := _processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def _processes_of(session: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if session in command:
            found.append(command[:300])
    return found


@pytest.mark.parametrize(("address", "tries"), [("", 2), ("127.0.0.1:1", 1)], ids=["local", "a cluster"])
def test_a_local_ray_that_is_slow_to_start_has_a_second_try(address: str, tries: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def slow(address: str, **arguments: Any) -> Any:
        asked.append(address)
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("skyrl_train.cluster.session._check_answers", lambda address: None)
    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(Exception, match="timed out during startup"), connect():
        pass
    assert asked == [address or "local"] * tries


def test_an_address_where_no_cluster_answers_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(ValueError, match="RAY_ADDRESS is '127.0.0.1:9', but no Ray cluster answers there"), connect():
        pass
    assert time.monotonic() - started < 60, "Ray itself tries for more than five minutes"


def test_a_driver_outside_of_the_cluster_gets_an_error_that_says_how_to_join(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ValueError, match="ray job submit"), connect():
        pass


def test_a_sender_and_the_engines_that_wait_for_it_hear_of_one_that_dies_while_they_meet(
    cluster: Cluster, members: list[Any], tmp_path: Path
):
    del members  # for what it registers
    engines = {f"engine-{n}": ray.remote(Member).options(num_cpus=0).remote() for n in range(2)}
    rank = ray.remote(Host).options(num_cpus=0).remote(RANK, str(tmp_path / "log"), None)
    alone = Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=0, timeout_s=10)
    ray.get(rank.call.remote("build", "tests.support.fake_actors:ExportsNothing", alone, {}))
    settings = load_config(["generator.weight_sync_timeout_s=60"]).generator
    settings = replace(settings, weight_sync_backend="broadcast")
    info = ray.get(rank.call.remote("open_sender", "training", engines, settings, 3, "policy-0"))
    store = torch.distributed.TCPStore(info["host"], info["port"], is_master=False)
    calls = {
        name: engine.init_weight_sync.remote(info | {"rank_offset": 1 + n})
        for n, (name, engine) in enumerate(engines.items())
    }
    connecting = rank.call.remote("connect_sender", "training", calls)
    store.wait([f"weights/came {n}" for n in (1, 2)])  # a third one never comes
    ray.kill(engines["engine-1"])
    killed = time.monotonic()
    with pytest.raises(WeightSyncError, match="engine-1 died when asked to join the weight sync"):
        ray.get(connecting, timeout=30)
    with pytest.raises(WeightSyncError, match="gave up"):
        ray.get(calls["engine-0"], timeout=30)
    assert time.monotonic() - killed < 40
