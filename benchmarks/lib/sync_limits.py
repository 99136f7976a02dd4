"""What the hardware needs for the bytes of a weight sync, and vLLM for loading them: the limits beside a sync."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skyrl_train.config import Config
from skyrl_train.device import device_type
from skyrl_train.engines.settings import EngineSettings, engine_arguments, set_environment

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 5


class LoadsAlone:
    """Mixed into vLLM's worker: loads tensors that it holds already."""

    def time_load_alone(self, repeats: int) -> list[float]:
        from skyrl_train.engines.vllm.worker.update import ModelUpdate
        from skyrl_train.weight_sync.bucket import TensorSpec

        worker: Any = self
        model, config = worker.model_runner.get_model(), worker.vllm_config
        held = tensors_of(Path(config.model_config.model), next(model.parameters()).device)
        update = ModelUpdate(model, config)
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for bucket in held for name, tensor in bucket]
        update.expect("benchmark", specs)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            update.begin(model, config.model_config)
            for bucket in held:
                update.load(bucket)
            faults = update.faults()
            update.finish()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            assert not faults, faults
        return seconds


def tensors_of(folder: Path, device: torch.device) -> list[list[tuple[str, torch.Tensor]]]:
    """A checkpoint in layer order, in float32 without a GPU, cut into lists of about 256 MiB, each one storage."""
    from safetensors import safe_open

    from skyrl_train.weight_sync.bucket import TensorSpec, fill, next_tensors, num_bytes, plan_buckets, unpack

    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = []
    for file in sorted(set(names.values())):
        with safe_open(folder / file, "pt") as opened:
            tensors += [(name, opened.get_tensor(name).to(device, dtype)) for name in opened.keys()]  # noqa: SIM118
    tensors.sort(key=lambda pair: [int(part) if part.isdigit() else 0 for part in pair[0].split(".")])
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    source = iter(tensors)
    buckets = []
    for plan in plan_buckets(specs, 256 << 20):
        buffer = torch.empty(num_bytes(plan), dtype=torch.uint8, device=device)
        buckets.append(list(unpack(fill(plan, next_tensors(plan, source), buffer))))
    return buckets


def load_alone(config: Config) -> float:
    """Median seconds of one load, after the first three."""
    generator = config.generator
    kwargs = {"worker_extension_cls": f"{__name__}.LoadsAlone", "enable_log_requests": None}
    settings = EngineSettings(
        generator=replace(generator, kv_cache_memory_gb=0.5, gpu_memory_utilization=0.3, engine_init_kwargs=kwargs),
        index=0,
        model_path=config.trainer.policy.model.path,
        served_model_name="alone",
        max_model_len=2048,
        seed=0,
        rpc_timeout_s=600,
    )
    set_environment(settings, device_type())
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    from vllm import LLM

    given = engine_arguments(settings, device_type())
    for name in ("enable_log_requests", "weight_transfer_config"):
        given.pop(name)
    llm = LLM(**given)
    (seconds,) = llm.collective_rpc("time_load_alone", args=(3 + REPEATS,))
    return statistics.median(seconds[3:])


def limit(num_bytes: int, colocate: bool) -> float:
    if device_type() == "cpu":
        return shm_copy(num_bytes)
    return device_copy(num_bytes) if colocate else nccl_broadcast(num_bytes)


def shm_copy(num_bytes: int) -> float:
    """Into shared memory and out again, through a warm mapping of 32 MiB as the transport has."""
    piece = 32 << 20
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones(num_bytes, dtype=torch.uint8)
    shared = torch.frombuffer(mmap.mmap(-1, piece), dtype=torch.uint8)

    def copy() -> None:
        for start in range(0, num_bytes, piece):
            part = shared[: min(piece, num_bytes - start)]
            part.copy_(source[start : start + piece])
            target[start : start + piece].copy_(part)

    return median_s(copy)


def shm_transfer(num_bytes: int) -> float:
    """The channel alone: a sender's tensors, digests on both sides, and a receiver that copies them out."""
    from skyrl_train.weight_sync.bucket import TensorSpec
    from skyrl_train.weight_sync.channels.shm import ShmSendChannel
    from skyrl_train.weight_sync.transport import Sender

    piece = 8 << 20
    tensors = [(f"t{n}", torch.ones(piece, dtype=torch.uint8)) for n in range(max(1, num_bytes // piece))]
    specs = [TensorSpec(name, tensor.dtype, (piece,)) for name, tensor in tensors]
    channel = ShmSendChannel(1, 60)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(channel.init_info, theirs, specs), daemon=True)
    process.start()
    sender = Sender(channel, 32 << 20, lambda message: _Answer(ours, message))
    sender.connect()
    seconds = median_s(lambda: sender.send(specs, tensors)) * num_bytes / (piece * len(tensors))
    sender.close()
    process.kill()
    return seconds


class _Answer:
    """A message to the receiver and its answer, as a sender waits for it."""

    def __init__(self, pipe: Any, message: dict[str, Any]) -> None:
        self._pipe = pipe
        pipe.send(message)

    def check(self) -> None:
        """A receiver that fails here closes its pipe."""

    def wait(self) -> None:
        self._pipe.recv()


def _receive(init_info: dict[str, Any], pipe: Any, specs: list[Any]) -> None:
    from skyrl_train.weight_sync.channels.shm import ShmReceiveChannel
    from skyrl_train.weight_sync.transport import Receiver

    torch.set_num_threads(1)
    receiver = Receiver(ShmReceiveChannel(init_info, 60))
    kept = {spec.name: torch.ones(spec.shape, dtype=spec.dtype) for spec in specs}

    def load(named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named_tensors:
            kept[name].copy_(tensor)

    while True:
        pipe.send(receiver.receive(pipe.recv(), load))


def device_copy(num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return median_s(copy)


def nccl_broadcast(num_bytes: int) -> float:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    ranks = [context.Process(target=_broadcast, args=(rank, num_bytes, queue)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    seconds = queue.get(timeout=300)
    for process in ranks:
        process.join()
    return seconds


def _broadcast(rank: int, num_bytes: int, queue: Any) -> None:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29733"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    data = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def broadcast() -> None:
        dist.broadcast(data, 0)
        torch.cuda.synchronize()

    seconds = median_s(broadcast)
    if rank == 0:
        queue.put(seconds)
        queue.close()
        queue.join_thread()
    os._exit(0)  # taking the group down in an orderly way hung for minutes (torch 2.11)


def median_s(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
