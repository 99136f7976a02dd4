"""A GPU without memory ends a call with who holds it and the keys that help."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch
from ray.exceptions import OutOfMemoryError as RayOutOfMemoryError

from skyrl_train.cluster.process import DeviceOutOfMemory, Host, explained
from skyrl_train.cluster.ranks.rank import PostedCalls
from skyrl_train.device.nvml import DeviceUse
from skyrl_train.service import client
from skyrl_train.service.queue import ServiceBroken
from skyrl_train.weight_sync.control import WeightSyncError

GIB = 2**30


def test_the_message_names_the_holders_and_the_keys():
    device = DeviceUse("0", GIB // 2, 80 * GIB, ((71, 60 * GIB), (72, 19 * GIB)))
    memory = {"allocated": 55.0 * GIB, "reserved": 60.0 * GIB}
    text = str(explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), memory, [device]))
    for part in (
        "This process holds 55.0 GiB in tensors, of 60.0 GiB reserved",
        "0.5 of 80.0 GiB are free (process 71 holds 60.0, process 72 holds 19.0)",
        "trainer.max_tokens_per_microbatch",
        "recompute_granularity=full",
        "generator.gpu_memory_utilization",
        "torch: CUDA out of memory. Tried to allocate 2 GiB",
    ):
        assert part in text


class Full:
    def update(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def other(self) -> None:
        raise RuntimeError("something else")

    def killed(self) -> None:
        raise RayOutOfMemoryError("Ray killed an actor")


def test_a_call_that_runs_out_of_memory_is_explained_and_other_errors_are_left_alone():
    host = Host.__new__(Host)
    host._object = Full()
    with pytest.raises(DeviceOutOfMemory, match=r"the device is out of memory\. .*torch: CUDA out of memory"):
        host.call("update")
    with pytest.raises(RuntimeError, match="^something else$"):
        host.call("other")
    with pytest.raises(RayOutOfMemoryError, match="Ray killed an actor"):
        host.call("killed")  # the memory of the host, which keys of micro-batches do not help


def test_a_process_that_ray_killed_for_the_hosts_memory_has_died(monkeypatch: pytest.MonkeyPatch):
    def killed(*arguments: Any, **named: Any) -> None:
        raise RayOutOfMemoryError("Ray killed an actor")

    monkeypatch.setattr(ray, "wait", lambda refs, **named: (refs, []))
    monkeypatch.setattr(ray, "get", killed)
    with pytest.raises(WeightSyncError, match="engine-0 died when asked to load the weights"):
        PostedCalls("load the weights", {"engine-0": "a reference"}).wait()
    with pytest.raises(ServiceBroken, match="the service's process has ended: Ray killed an actor"):
        client._answer("a reference")
