"""What a weight sync takes, part by part, against what the hardware needs for the same bytes.

    python -m benchmarks.sync                                        # CPU: shared memory, one engine
    python -m benchmarks.sync --shape qwen3-8b                       # two GPUs: policy and engine apart
    python -m benchmarks.sync --shape qwen3-30b-a3b --layers 24 --pp 2  # three GPUs
    python -m benchmarks.sync --shape qwen3-8b --colocate            # one GPU

One run of real processes (Ray, Megatron, vLLM) with random weights. The limit is measured in the same run:
  CPU       the bytes copied into shared memory and out again, by one process
  two GPUs  one NCCL broadcast of the bytes between two processes
  one GPU   one copy of the bytes on the device
and `load alone` is vLLM's own loading (and, on a CPU, repacking) of tensors that its process already holds.
"""

from __future__ import annotations

import argparse
import asyncio
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
from rich.console import Console
from rich.table import Table

from benchmarks.lib.random_model import SHAPES, write_checkpoint
from benchmarks.lib.results import write_json
from benchmarks.lib.sync_limits import limit, load_alone, shm_transfer
from skyrl_train.cluster.launch import Processes, launch
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config, load_config
from skyrl_train.device import device_type
from skyrl_train.ranks import WEIGHTS
from skyrl_train.trainer.from_config import objective


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has (4 without a GPU)")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--colocate", action="store_true", help="policy and engine share the GPUs")
    parser.add_argument("--backend", default="auto", help="generator.weight_sync_backend")
    parser.add_argument("--bucket-mb", type=int, help="generator.weight_sync_bucket_mb")
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
    write_json(args.json, report)
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
            *([f"generator.weight_sync_bucket_mb={args.bucket_mb}"] if args.bucket_mb else []),
        ]
    )


async def run_syncs(config: Config, count: int, folder: Path) -> list[dict[str, float]]:
    """The parts of each sync in seconds, and its bytes."""
    goal = objective(config.trainer.algorithm, config.generator.sampling_params)
    with connect() as cluster:
        processes = await launch(
            config, cluster, max_model_len=2048, objective=goal, num_optimizer_steps=10, logs=str(folder / "logs")
        )
        try:
            found = []
            for _ in range(count):
                moved = await _make_room(processes) if processes.sharing.takes_turns else {}
                result = await processes.weight_sync.send_once()
                if processes.sharing.takes_turns:
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
    moved = await processes.policy.reload(WEIGHTS)
    before = time.perf_counter()
    await processes.engines.wake_weights()
    return {"sleep": asleep - started, "reload weights": moved.seconds, "wake weights": time.perf_counter() - before}


async def _give_room(processes: Processes) -> dict[str, float]:
    moved = await processes.policy.offload(WEIGHTS)
    before = time.perf_counter()
    await processes.engines.wake_kv_cache()
    return {"offload weights": moved.seconds, "wake KV cache": time.perf_counter() - before}


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
