"""What a weight sync takes, part by part, against what the hardware needs for the same bytes.

    python benchmarks/weight_sync.py                                        # CPU: shared memory, one engine
    python benchmarks/weight_sync.py --shape qwen3-8b                       # two GPUs: policy and engine apart
    python benchmarks/weight_sync.py --shape qwen3-30b-a3b --layers 24 --pp 2  # three GPUs
    python benchmarks/weight_sync.py --shape qwen3-8b --colocate            # one GPU

One run of real processes (Ray, Megatron, vLLM) with random weights. The limit is measured in the same run:
  CPU       the bytes copied into shared memory and out again, by one process
  two GPUs  one NCCL broadcast of the bytes between two processes
  one GPU   one copy of the bytes on the device
and `load alone` is vLLM's own loading (and, on a CPU, repacking) of tensors that its process already holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from random_model import SHAPES, write_checkpoint
from rich.console import Console
from rich.table import Table

from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config, load_config
from skyrl_train.device import device_type
from skyrl_train.engines.settings import EngineSettings, engine_arguments, set_environment
from skyrl_train.ranks import WEIGHTS
from skyrl_train.trainer.rules import objective

REPEATS = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has (4 without a GPU)")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--colocate", action="store_true", help="policy and engine share the GPUs")
    parser.add_argument("--backend", default="auto", help="generator.weight_sync_backend")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--model", type=Path, help="keep the checkpoint in this folder, or take it from there")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.layers is None and not torch.cuda.is_available():
        args.layers = 4
    return args


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or Path(scratch, "model")
        if not (model / "config.json").exists():
            in_child(write_checkpoint, model, args.shape, args.layers)
        config = config_of(args, model)
        syncs = asyncio.run(run_syncs(config, args.syncs, Path(scratch)))
        num_bytes = syncs[0]["num_bytes"]
        load_s = in_child(load_alone, config)
        limit_s = in_child(limit, int(num_bytes), args.colocate)
        transfer_s = in_child(shm_transfer, int(num_bytes)) if device_type() == "cpu" else None
    report = (
        summary(syncs, load_s, limit_s) | {"transfer_alone_s": transfer_s} | {"device": device_name(), **vars(args)}
    )
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, default=str, indent=1))
    return 0


def config_of(args: argparse.Namespace, model: Path) -> Config:
    ranks = args.pp * args.tp
    on_gpu = device_type() == "cuda"
    return load_config(
        [
            f"trainer.policy.model.path={model}",
            "data.train_data=[none.jsonl]",
            f"trainer.placement.policy_num_gpus_per_node={ranks}",
            *(["trainer.placement.colocate_all=true"] if args.colocate else []),
            f"trainer.policy.megatron_config.pipeline_model_parallel_size={args.pp}",
            f"trainer.policy.megatron_config.tensor_model_parallel_size={args.tp}",
            f"trainer.policy.megatron_config.expert_model_parallel_size={args.ep}",
            "trainer.algorithm.use_kl_loss=false",
            f"trainer.bf16={str(on_gpu).lower()}",
            "trainer.train_batch_size=8",
            "trainer.policy_mini_batch_size=8",
            "generator.kv_cache_memory_gb=0.5",
            "generator.gpu_memory_utilization=0.3",
            f"generator.inference_engine_tensor_parallel_size={ranks if args.colocate else 1}",
            f"generator.weight_sync_backend={args.backend}",
            f"generator.weight_sync_bucket_mb={args.bucket_mb}",
        ]
    )


async def run_syncs(config: Config, count: int, folder: Path) -> list[dict[str, float]]:
    """The parts of each sync in seconds, and its bytes."""
    goal = objective(config.trainer.algorithm, config.generator.sampling_params, 1024)
    with connect() as cluster:
        processes = await launch(config, cluster, 2048, goal, 10, str(folder / "logs"))
        try:
            found = []
            for _ in range(count):
                moved = await _make_room(processes) if config.trainer.placement.colocate_all else {}
                result = await processes.policy.send_weights(config.generator.model_dtype)
                if config.trainer.placement.colocate_all:
                    moved |= await _give_room(processes)
                found.append(
                    moved
                    | {
                        "num_bytes": float(result.num_bytes),
                        "num_tensors": float(sum(len(report.digests) for report in result.reports)),
                        "whole": result.seconds,
                        "begin": result.begin_s,
                        "finish": result.finish_s,
                        "send": sum(report.seconds for report in result.reports),
                        "plan": sum(report.plan_s for report in result.reports),
                        "convert": sum(report.convert_s for report in result.reports),
                        "pack": sum(report.pack_s for report in result.reports),
                        "verify": sum(report.digest_s for report in result.reports),
                        "wait": sum(report.wait_s for report in result.reports),
                    }
                )
            return found
        finally:
            await processes.stop()


async def _make_room(processes: Processes) -> dict[str, float]:
    started = time.perf_counter()
    await processes.engines.sleep()
    asleep = time.perf_counter()
    moved = await processes.release.enter(processes.policy, WEIGHTS)
    before = time.perf_counter()
    await processes.engines.wake_weights()
    return {"sleep": asleep - started, "reload weights": moved.seconds, "wake weights": time.perf_counter() - before}


async def _give_room(processes: Processes) -> dict[str, float]:
    moved = await processes.release.leave(processes.policy, WEIGHTS)
    before = time.perf_counter()
    await processes.engines.wake_kv_cache()
    return {"offload weights": moved.seconds, "wake KV cache": time.perf_counter() - before}


class LoadsAlone:
    """Mixed into vLLM's worker: loads tensors that it holds already."""

    def time_load_alone(self, repeats: int) -> list[float]:
        from skyrl_train.engines.vllm.worker.update import ModelUpdate

        worker: Any = self
        model, config = worker.model_runner.get_model(), worker.vllm_config
        held = tensors_of(Path(config.model_config.model), next(model.parameters()).device)
        update = ModelUpdate(model, config)
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

    from skyrl_train.weight_sync.bucket import TensorSpec, cut, fill, unpack

    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = []
    for file in sorted(set(names.values())):
        with safe_open(folder / file, "pt") as opened:
            tensors += [(name, opened.get_tensor(name).to(device, dtype)) for name in opened.keys()]  # noqa: SIM118
    tensors.sort(key=lambda pair: [int(part) if part.isdigit() else 0 for part in pair[0].split(".")])
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    source = iter(tensors)
    return [
        list(unpack(fill(plan, source, torch.empty(plan.num_bytes, dtype=torch.uint8, device=device))))
        for plan in cut(specs, 256 << 20)
    ]


def load_alone(config: Config) -> float:
    """Median seconds of one load, after the first three."""
    from skyrl_train.device import device_type

    generator = config.generator
    settings = EngineSettings(
        model_path=config.trainer.policy.model.path,
        served_model_name="alone",
        model_dtype=generator.model_dtype,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 29,
        gpu_memory_utilization=0.3,
        engine_init_kwargs={"worker_extension_cls": "weight_sync.LoadsAlone", "enable_log_requests": None},
    )
    set_environment(settings, device_type())
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
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
    tensors = [(f"t{n}", torch.ones(piece, dtype=torch.uint8)) for n in range(num_bytes // piece)]
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


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a process of its own, which takes the memory of its device with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} failed; its error is above") from None
    finally:
        process.join()


def _answer(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1 if device_type() == "cpu" else 8)
    pipe.send(function(*args))


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"


def summary(syncs: list[dict[str, float]], load_s: float, limit_s: float) -> dict[str, Any]:
    """The first sync; medians of those from the fourth on; the two baselines."""
    later = {name: statistics.median(sync[name] for sync in syncs[3:]) for name in syncs[0]}
    return {
        "gigabytes": later["num_bytes"] / 1e9,
        "num_tensors": later["num_tensors"],
        "first_s": syncs[0]["whole"],
        "second_s": syncs[1]["whole"],
        "later": later,
        "load_alone_s": load_s,
        "limit_s": limit_s,
        "whole_over_limit": later["whole"] / limit_s,
        "whole_over_load": later["whole"] / load_s,
        "send_over_limit": later["send"] / limit_s,
        "verify_share": later["verify"] / later["whole"],
    }


def show(report: dict[str, Any]) -> None:
    table = Table(
        "part", "seconds", "GB/s", title=f"{report['gigabytes']:.2f} GB in {report['num_tensors']:.0f} tensors"
    )
    parts = {"limit: the bytes once": report["limit_s"], "vLLM's load alone": report["load_alone_s"]}
    if report["transfer_alone_s"] is not None:
        parts |= {"transfer alone": report["transfer_alone_s"]}
    parts |= {"first sync": report["first_s"], "second sync": report["second_s"]}
    names = {
        "whole": "later syncs, pause to resume",
        "begin": "  pause, open the update",
        "finish": "  compare, close, resume",
        "send": "  sending",
        "plan": "    plan",
        "convert": "    gather and convert",
        "pack": "    pack",
        "verify": "    digests",
        "wait": "    wait for the engine",
    }
    parts |= {label: report["later"][name] for name, label in names.items()}
    parts |= {name: s for name, s in report["later"].items() if name not in names and not name.startswith("num_")}
    for label, seconds in parts.items():
        table.add_row(label, f"{seconds:.4f}", f"{report['gigabytes'] / seconds:.1f}" if seconds > 1e-4 else "")
    Console().print(table)
    print(
        f"whole / limit {report['whole_over_limit']:.2f}, whole / load alone {report['whole_over_load']:.2f}, "
        f"first / later {report['first_s'] / report['later']['whole']:.2f}, digests {report['verify_share']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
