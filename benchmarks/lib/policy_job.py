"""A policy, its layout and a mini-batch, from the options of a command. Touches no GPU in this process."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.random_model import SHAPES, write_checkpoint
from skyrl_train.config import load_config
from skyrl_train.config.policy import MegatronConfig

if TYPE_CHECKING:
    from benchmarks.lib.update_ranks import Job

GIB = 2**30


def add_model(parser: argparse.ArgumentParser) -> None:
    """Options of the model and its layout."""
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--gpus", type=int, default=1, help="policy ranks")
    for name in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--vpp", type=int, help="model chunks per pipeline rank")
    parser.add_argument("--impl", choices=("auto", "torch", "transformer_engine"), default="auto")
    parser.add_argument("--recompute", choices=("selective", "full"))
    parser.add_argument(
        "--recompute-modules", default="core_attn", help="of --recompute selective, with commas between"
    )
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--model", type=Path, help="keep the checkpoint in this folder, or take it from there")


def add_batch(parser: Any) -> None:
    """Options of an update's mini-batch; parser may be a group of options."""
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sample-tokens", type=int, default=1024)
    parser.add_argument("--spread", action="store_true", help="lengths from an eighth of --sample-tokens to all of it")
    parser.add_argument("--float32", action="store_true")


def layout(args: argparse.Namespace) -> MegatronConfig:
    return replace(
        load_config().trainer.policy.megatron_config,
        transformer_impl=args.impl,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        recompute_granularity=args.recompute,
        recompute_modules=tuple(args.recompute_modules.split(",")),
    )


def _write_model(rendezvous: Any, job: tuple[str, str, int | None]) -> None:
    folder, shape, num_layers = job
    write_checkpoint(Path(folder), shape, num_layers)


def make_model(folder: Path, args: argparse.Namespace, timeout_s: float = 600.0) -> None:
    """In a process of its own, so that this one never uses the GPU.

    Raises: RuntimeError with the reason if it cannot be made, or not in time.
    """
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    if not (folder / "model.safetensors.index.json").exists():
        run_on_ranks(_write_model, (str(folder), args.shape, args.layers), 1, timeout_s=timeout_s)


def update_job(folder: Path, args: argparse.Namespace) -> Job:
    """What add_model() and add_batch() say."""
    from benchmarks.lib.update_ranks import Job

    return Job(
        model_path=str(folder),
        megatron=layout(args),
        optimizer=replace(load_config().trainer.policy.optimizer_config, lr=1e-6),
        num_samples=args.samples,
        sample_tokens=args.sample_tokens,
        spread=args.spread,
        max_tokens=args.max_tokens,
        bf16=not args.float32,
    )


def title(args: argparse.Namespace, what: str) -> str:
    sizes = [f"{name.upper()}={getattr(args, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(args, name) > 1]
    layers = "" if args.layers is None else f" with {args.layers} layers"
    return f"{what}, {args.shape}{layers}, {args.gpus} policy rank(s) {' '.join(sizes)}"
