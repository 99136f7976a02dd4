"""Which way the weights take, and what devices cannot do, before any process is started."""

from __future__ import annotations

import pytest

from skyrl_train.cluster import devices
from skyrl_train.cluster.devices import (
    endpoint_warning,
    require_gpus_for_snapshots,
    require_kernels_for_adapters,
    sync_backend,
)
from skyrl_train.cluster.placement import PlacementError
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import load_config
from skyrl_train.device.kinds import device_kind

SHARED = "trainer.placement.colocate_all=true"


def way(*overrides: str, gpus: bool, local: bool = True) -> str:
    return sync_backend(load_config(list(overrides)), Cluster("", is_local=local, has_gpus=gpus))


def test_auto_takes_the_fastest_way_that_reaches_all_engines():
    assert way(gpus=False) == "shm" and way(gpus=False, local=False) == "broadcast"
    assert way(gpus=True) == "broadcast" and way(SHARED, gpus=True) == "cuda_ipc"
    assert way(SHARED, gpus=False) == "shm"
    assert way("generator.run_engines_locally=false", gpus=False) == "broadcast"


@pytest.mark.parametrize(
    ("backend", "gpus", "cure"),
    [("broadcast", True, "auto"), ("cuda_ipc", False, "auto"), ("vllm_nccl", False, "broadcast")],
)
def test_a_way_that_the_devices_do_not_have_is_refused_with_the_cure(backend: str, gpus: bool, cure: str):
    with pytest.raises(PlacementError, match=f"weight_sync_backend is {backend}.* [Uu]se {cure}"):
        way(SHARED, f"generator.weight_sync_backend={backend}", gpus=gpus)


def test_a_broadcast_reaches_engines_with_gpus_of_their_own_and_any_without():
    assert way("generator.weight_sync_backend=broadcast", gpus=True) == "broadcast"
    assert way(SHARED, "generator.weight_sync_backend=broadcast", gpus=False) == "broadcast"


RECORD = "megatron_config.torch_profiler_config.record_memory"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([f"trainer.policy.{RECORD}=true"], f"trainer.policy.{RECORD}"),
        ([f"trainer.ref.{RECORD}=true"], f"trainer.ref.{RECORD}"),
    ],
)
def test_snapshots_of_device_memory_are_refused_without_gpus(overrides: list[str], key: str):
    trainer = load_config(overrides).trainer
    assert trainer.frozen_models
    require_gpus_for_snapshots(trainer, Cluster("", is_local=True, has_gpus=True))
    with pytest.raises(PlacementError, match=f"{key} is true, and the cluster has no GPUs"):
        require_gpus_for_snapshots(trainer, Cluster("", is_local=True, has_gpus=False))


def test_without_snapshots_no_gpu_is_asked_for():
    require_gpus_for_snapshots(load_config([]).trainer, Cluster("", is_local=True, has_gpus=False))


ADAPTERS = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.sync=adapter"]


def test_float32_adapters_are_refused_on_gpus_where_vllm_has_no_kernels_for_them():
    on_gpus, on_cpus = (Cluster("", is_local=True, has_gpus=gpus) for gpus in (True, False))
    exact = [*ADAPTERS, "trainer.bf16=false", "generator.model_dtype=float32"]
    with pytest.raises(PlacementError, match=r"adapters on GPUs support half precision only. Set lora.sync=merged"):
        require_kernels_for_adapters(load_config(exact), on_gpus)
    require_kernels_for_adapters(load_config(exact), on_cpus)
    for cure in ("trainer.policy.model.lora.sync=merged", "generator.model_dtype=bfloat16"):
        require_kernels_for_adapters(load_config([*exact, cure]), on_gpus)


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_mfu_is_measured_against_the_peak_of_this_very_device(name: str, tflops: float | None):
    kind = device_kind(name)
    assert (kind and kind.tflops) == tflops


@pytest.mark.parametrize(
    ("num_nodes", "overrides", "warns"),
    [
        (2, [], True),
        (1, [], False),
        (2, ["generator.enable_http_endpoint=false"], False),
        (2, ["generator.http_endpoint_host=0.0.0.0", "generator.http_api_key=k"], False),
    ],
)
def test_endpoints_that_other_nodes_cannot_reach_cause_a_warning(
    num_nodes: int, overrides: list[str], warns: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(devices, "alive_nodes", lambda: [f"node{index}" for index in range(num_nodes)])
    warning = endpoint_warning(load_config(["generator.enable_http_endpoint=true", *overrides]).generator)
    assert (warning is not None) is warns
    if warning is not None:
        assert warning.startswith("generator.http_endpoint_host is 127.0.0.1: each of the cluster's 2 nodes can reach")
