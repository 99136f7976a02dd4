"""An engine takes what is free on its devices, but for a margin that is worked out here by hand."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl_train.cluster.pool.settings import all_engine_settings
from skyrl_train.config import load_config
from skyrl_train.device.nvml import DeviceUse, devices_in_use
from skyrl_train.engines.settings import EngineSettings, Margin, engine_arguments
from skyrl_train.engines.vllm import memory
from skyrl_train.engines.vllm.memory import ModelSize, max_cache_bytes, memory_fraction, with_memory_sizes
from tests.support.settings import MIB, changed, engine_settings

GIB = 2**30
SMALL = ModelSize(weights_bytes=GIB, vocabulary=151_936)


def gpu(free: float, total: float, name: str = "0") -> DeviceUse:
    return DeviceUse(name, int(free * GIB), int(total * GIB))


@pytest.mark.parametrize(
    ("free", "total", "margin", "share"),
    [
        (138, 140, Margin(), 0.887),  # a tenth: 124.2 of 140
        (138, 140, Margin(for_trainers=3 * GIB), 0.865),  # 121.2 of 140
        (70, 140, Margin(), 0.45),  # 63 of 140
        (15, 16, Margin(), 0.75),  # 3 GiB
        (15, 16, Margin(scored_tokens=1024), 0.677),  # 3 + 1024 * 151936 * 8 / 2**30 = 1.159: 10.841 of 16
        (138, 140, Margin(scored_tokens=100_000), 0.717),  # 3 and a quarter, 34.5
        (100, 140, Margin(share=0.5), 0.357),  # 50 of 140
    ],
)
def test_the_share_leaves_the_margin(free: float, total: float, margin: Margin, share: float):
    assert memory_fraction([gpu(free, total)], margin, SMALL) == share


def test_vllms_own_check_at_the_start_passes():
    """It wants ceil(share * total) to be free, when its CUDA context has been made."""
    for free in range(8, 140):
        device = gpu(free + 0.123, 139.8)
        share = memory_fraction([device], Margin(), SMALL)
        assert math.ceil(share * device.total_bytes) <= device.free_bytes - 3 * GIB


def test_an_engine_of_several_devices_takes_what_the_fullest_one_can_give():
    assert memory_fraction([gpu(138, 140), gpu(70, 140), gpu(100, 140)], Margin(), SMALL) == 0.45


def test_too_little_free_memory_is_an_error_that_says_who_holds_it():
    full = DeviceUse("3", 20 * GIB, 140 * GIB, ((4711, 100 * GIB), (12, GIB // 2)))
    with pytest.raises(MemoryError) as raised:
        memory_fraction([gpu(138, 140), full], Margin(), ModelSize(17 * GIB, 1000))
    message = str(raised.value)
    assert "GPU 3: 20.0 of 140.0 GiB are free (process 4711 holds 100.0, process 12 holds 0.5)" in message
    assert "3.0 GiB of that are reserved" in message and "weights of 17.0 GiB" in message
    assert "generator.gpu_memory_utilization" in message
    assert memory_fraction([full], Margin(), ModelSize(16 * GIB, 1000)) == 0.121


class FakeNvml:
    """Two GPUs; writes where the library would."""

    memory = ((139, 140), (50, 140))
    uuids = (b"GPU-aaaa", b"MIG-bbbb")

    def __init__(self) -> None:
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        if index.value >= len(self.memory):
            return 2
        device._obj.value = 1 + index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        device._obj.value = 1 + self.uuids.index(uuid.value)
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        free, total = self.memory[device.value - 1]
        # nvmlMemory_t: unsigned long long total, free, used
        (ctypes.c_ulonglong * 3).from_address(ctypes.addressof(memory._obj))[:] = [
            total * GIB,
            free * GIB,
            (total - free) * GIB,
        ]
        return 0

    def nvmlDeviceGetName(self, device: Any, name: Any, length: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, processes: Any) -> int:
        if device.value == 1:
            return 3  # not supported
        for index, (pid, used) in enumerate([(7, GIB), (8, 2**64 - 1), (9, 89 * GIB)]):
            processes[index].pid, processes[index].used = pid, used
        count._obj.value = 3
        return 0


@pytest.mark.parametrize("visible", ["1,0", "MIG-bbbb,GPU-aaaa"])
def test_devices_are_those_that_cuda_shows_in_its_order(visible: str, monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    second, first = devices_in_use(2, nvml)
    assert (second.free_bytes, second.total_bytes) == (50 * GIB, 140 * GIB)
    assert second.holders == ((9, 89 * GIB), (7, GIB)), "the driver did not say what process 8 holds"
    assert first.free_bytes == 139 * GIB and first.holders == ()
    assert [one.name for one in devices_in_use(1, nvml)] == [visible.split(",")[0]]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [one.free_bytes for one in devices_in_use(2, nvml)] == [139 * GIB, 50 * GIB]
    assert not nvml.is_open


def test_a_device_that_the_driver_does_not_know_is_an_error(monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(OSError, match="could not find GPU '5' of CUDA_VISIBLE_DEVICES"):
        devices_in_use(1, nvml)
    assert not nvml.is_open


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    """Of a model with 100 rows of 8 and 64 other numbers."""
    weights = {"model.embed_tokens.weight": torch.zeros(100, 8), "model.norm.weight": torch.zeros(64)}
    save_file(weights, tmp_path / "model.safetensors")
    return engine_settings(str(tmp_path), "m", "bfloat16", 128, kv_cache_memory_gb=MIB)


def test_the_size_of_a_model_is_read_from_its_files(settings: EngineSettings):
    assert ModelSize.of(settings) == ModelSize(2 * (100 * 8 + 64), 100)


def test_quantised_matrices_have_a_byte_per_element_and_a_scale_per_row(settings: EngineSettings):
    names = ["layers.0.mlp.down_proj", "layers.0.mlp.gate", "embed_tokens"]
    weights = {f"model.{name}.weight": torch.zeros(100, 8) for name in names} | {"lm_head.weight": torch.zeros(100, 8)}
    weights |= {"model.norm.weight": torch.zeros(64), "model.experts": torch.zeros(3, 10, 8)}
    save_file(weights, Path(settings.model_path, "model.safetensors"))
    quantised = 100 * (8 + 4) + 3 * 10 * (8 + 4)
    assert ModelSize.of(settings.changed(quantization="fp8")).weights_bytes == quantised + 2 * (3 * 800 + 64)


def test_an_engine_with_a_gpu_gets_a_number_and_says_which(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(memory, "devices_in_use", lambda num_devices: [gpu(138, 140)] * num_devices)
    assert "gpu_memory_utilization" not in engine_arguments(settings, "cuda")
    arguments = engine_arguments(with_memory_sizes(settings, "cuda"), "cuda")
    assert arguments["gpu_memory_utilization"] == 0.887
    assert capsys.readouterr().out == ("gpu_memory_utilization: 0.887, 124.2 GiB. GPU 0: 138.0 of 140.0 GiB are free\n")


def shared(settings: EngineSettings, **values: Any) -> EngineSettings:
    """64 layers of 4 heads of 128, of which keys and values are 64 * 2 * 4 * 128 * 2 bytes: 128 KiB a token."""
    folder = Path(settings.model_path)
    (folder / "config.json").write_text('{"num_hidden_layers": 64, "num_key_value_heads": 4}')
    rows = torch.zeros(512, 1, dtype=torch.bfloat16)
    names = [f"model.layers.{n}.self_attn.{which}_proj.weight" for n in range(64) for which in "kv"]
    weights = {name: rows.clone() for name in names} | {"model.embed_tokens.weight": torch.zeros(100, 8)}
    save_file(weights, folder / "model.safetensors")
    return changed(settings, kv_cache_memory_gb=None, **values)


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({"cached_sequences": 255}, 256 * 128),
        ({"cached_sequences": 255, "max_model_len": 129}, 256 * 256),
        ({"cached_sequences": 511, "inference_engine_tensor_parallel_size": 2}, 512 * 128 / 2),
        (
            {"cached_sequences": 511, "inference_engine_tensor_parallel_size": 8},
            512 * 128 / 4,
        ),  # a worker has a head, never less
        ({"cached_sequences": 511, "model_dtype": "float32"}, 512 * 128 * 2),
        ({"cached_sequences": 255, "engine_init_kwargs": {"max_model_len": 1024}}, 256 * 1024),
        ({"cached_sequences": 255, "engine_init_kwargs": {"num_gpu_blocks_override": 7}}, None),
        ({}, None),
        ({"cached_sequences": 4096}, None),  # 64 GiB, more than half of 124
    ],
)
def test_a_cache_is_not_larger_than_its_sequences_can_fill(
    values: dict[str, Any], tokens: float | None, settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "devices_in_use", lambda num_devices: [gpu(138, 140)] * num_devices)
    taken = with_memory_sizes(shared(settings, **values), "cuda")
    assert taken.generator.gpu_memory_utilization == 0.887
    found = engine_arguments(taken, "cuda").get("kv_cache_memory_bytes")
    assert found == (None if tokens is None else tokens * (128 << 10))


def test_a_latent_vector_is_whole_on_each_worker_and_layers_after_the_last_keep_none(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "num_key_value_heads": 16}')
    names = [f"model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight" for n in range(4)]
    save_file({name: torch.zeros(576, 1) for name in names}, tmp_path / "model.safetensors")
    settings = engine_settings(str(tmp_path), "m", "bfloat16", 128, inference_engine_tensor_parallel_size=2)
    assert max_cache_bytes(settings, 9) == 10 * 128 * 3 * 576 * 2
    for dtype, width in {"fp8": 1, "fp8_e5m2": 1, "bfloat16": 2, "auto": 2}.items():
        one = settings.changed(engine_init_kwargs={"kv_cache_dtype": dtype})
        assert max_cache_bytes(one, 9) == 10 * 128 * 3 * 576 * width


def test_a_cache_of_unknown_size_is_left_to_vllm(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "devices_in_use", lambda num_devices: [gpu(138, 140)] * num_devices)
    given = shared(settings, cached_sequences=255)
    (Path(given.model_path) / "config.json").write_text('{"num_hidden_layers": 65, "num_key_value_heads": 4}')
    assert with_memory_sizes(given, "cuda").generator.kv_cache_memory_gb is None, (
        "a layer without keys keeps something else"
    )


@pytest.mark.parametrize(
    ("overrides", "sequences"),
    [
        (["trainer.placement.colocate_all=false"], None),
        (["trainer.train_batch_size=512", "generator.num_inference_engines=4"], 128 * 5 + 5),
        (["trainer.train_batch_size=512"], 1024),
        (["trainer.train_batch_size=512", "generator.max_turns=2"], 512 * 5 + 5),
        (["trainer.train_batch_size=64", "trainer.source=streaming"], 2 * 64 * 5 + 5),
        (["generator.enable_http_endpoint=true"], None),
    ],
    ids=["devices of its own", "a part of a step", "as many as it computes", "some wait", "two steps", "clients"],
)
def test_engines_on_shared_devices_get_the_number_of_sequences(overrides: list[str], sequences: int | None):
    config = load_config(["trainer.placement.colocate_all=true", *overrides])
    one, *_ = all_engine_settings(config, 640, "cuda_ipc")
    assert isinstance(one, EngineSettings) and one.cached_sequences == sequences


@pytest.mark.parametrize(
    ("device", "values"),
    [
        ("cpu", {}),
        ("cuda", {"gpu_memory_utilization": 0.3}),
        ("cuda", {"engine_init_kwargs": {"gpu_memory_utilization": 0.3}}),
    ],
    ids=["no GPU", "a number", "a number for vLLM"],
)
def test_nobody_asks_without_a_gpu_or_where_the_user_gave_a_number(
    device: str, values: dict[str, Any], settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "devices_in_use", lambda num_devices: pytest.fail("asked"))
    given = engine_settings(settings.model_path, "m", "bfloat16", 128, kv_cache_memory_gb=MIB, **values)
    assert with_memory_sizes(given, device) == given
    assert engine_arguments(given, device).get("gpu_memory_utilization") == (0.3 if values else None)


def test_without_the_drivers_answer_the_user_is_asked_for_a_number(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
):
    def fails(num_devices: int) -> list[DeviceUse]:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(memory, "devices_in_use", fails)
    with pytest.raises(OSError, match=r"libnvidia-ml.so.1.*: set generator.gpu_memory_utilization"):
        with_memory_sizes(settings, "cuda")


@pytest.mark.parametrize(
    ("overrides", "margin"),
    [
        ([], Margin(scored_tokens=640)),
        (["trainer.verify_sync_every=0"], Margin()),
        (["trainer.placement.colocate_all=true"], Margin(scored_tokens=640, for_trainers=4 * GIB)),
        (
            ["trainer.placement.colocate_all=true", "trainer.algorithm.use_kl_loss=false"],
            Margin(scored_tokens=640, for_trainers=2 * GIB),
        ),
        (
            ["trainer.placement.colocate_all=true", "trainer.placement.release=none"],
            Margin(scored_tokens=640, share=0.5),
        ),
        (
            ["trainer.placement.colocate_all=true", "trainer.placement.release=none", "generator.kv_cache_memory_gb=4"],
            Margin(scored_tokens=640),
        ),
    ],
    ids=["dedicated", "nothing scored", "policy and reference", "policy", "none", "none, a given cache"],
)
def test_the_margin_counts_the_trainers_that_come_back_to_the_devices(overrides: list[str], margin: Margin):
    config = load_config(overrides)
    (one,) = all_engine_settings(config, 640, "auto")
    assert isinstance(one, EngineSettings)
    assert one.margin == margin
    assert one.generator.gpu_memory_utilization is None
