"""Processes that take turns lie on the same devices, on a local Ray that believes to have two."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from skyrl_train.cluster import placement as placements
from skyrl_train.cluster.placement import Demand, Placement, PlacementError, Slot
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.cluster.session import connect
from skyrl_train.cluster.sharing import SharedDevices
from skyrl_train.config import load_config

pytestmark = pytest.mark.slow
DEMANDS = [Demand("policy ranks", 2, 1), Demand("reference ranks", 2, 1), Demand("engines", 1, 2)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    init = ray.init
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RAY_ADDRESS", raising=False)
            patch.setattr("ray.init", lambda **arguments: init(**arguments, num_cpus=2, num_gpus=2))
            stack.enter_context(connect())
        yield


async def reserve(use_gpus: bool = True) -> Placement:
    config = load_config(["trainer.placement.cpus_per_worker=0.1", "trainer.placement.timeout_s=30"])
    return await Placement.reserve_shared(DEMANDS, config.trainer.placement, use_gpus=use_gpus)


def test_each_rank_shares_its_device_and_keeps_it_when_its_process_is_replaced(cluster: None, tmp_path: Path):
    async def main() -> None:
        placement = await reserve()
        slots = placement.slots
        policy = WorkerGroup("policy", slots["policy ranks"], str(tmp_path), 60)
        shared, sharing = await policy.visible_devices(), SharedDevices(load_config([]))
        assert sorted(shared) == ["0", "1"]
        others = {
            name: WorkerGroup(
                name.split()[0], slots[name], str(tmp_path), 60, await sharing.visible_devices(policy, slots[name])
            )
            for name in ("reference ranks", "engines")
        }
        assert await others["reference ranks"].visible_devices() == shared
        assert await others["engines"].visible_devices() == [",".join(shared)]
        before = [pid for _, pid, _ in await policy.places()]
        assert all(one["free"] > 0 for one in await ModelGroup(policy).memory())
        await policy.end()
        assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in before)
        assert await ModelGroup(policy).memory() == []
        policy.spawn()
        assert await policy.visible_devices() == shared
        after = [pid for _, pid, _ in await policy.places()]
        assert not set(before) & set(after)
        for group in (policy, *others.values()):
            await group.shutdown()
        placement.remove()

    asyncio.run(main())


def test_a_process_sees_its_own_device_where_ray_is_told_to_set_none(
    cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    options, unset = Slot.options, {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    monkeypatch.setattr(Slot, "options", lambda slot: options(slot) | {"runtime_env": unset})

    async def main() -> list[str]:
        placement = await reserve()
        policy = WorkerGroup("policy", placement.slots["policy ranks"], str(tmp_path), 60)
        try:
            return await policy.visible_devices()
        finally:
            await policy.shutdown()
            placement.remove()

    assert sorted(asyncio.run(main())) == ["0", "1"]


def test_an_engine_is_not_cut_in_two_by_nodes(cluster: None, monkeypatch: pytest.MonkeyPatch):
    nodes = {"bundles_to_node_id": {0: "first", 1: "second"}}
    monkeypatch.setattr(placements, "placement_group_table", lambda group: nodes)
    with pytest.raises(PlacementError, match="one of the engines would use 2 devices on two nodes"):
        asyncio.run(reserve())
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_a_rank_names_its_device_before_it_imports_torch_which_takes_seconds():
    code = "import sys; from skyrl_train.cluster.ranks.rank import Rank; Rank(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
