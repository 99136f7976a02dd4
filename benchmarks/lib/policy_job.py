"""A policy, its layout and a mini-batch, from the options of a command. Touches no GPU in this process."""

from __future__ import annotations

import argparse
import fcntl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lib.random_model import SHAPES, model_config, write_checkpoint
from skyrl_train.config import load_config
from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.config.training import RunConfig
from skyrl_train.device.kinds import this_device
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.forecast import Inputs, workload_of

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
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters that are trained instead of the weights")
    parser.add_argument("--impl", choices=("auto", "torch", "transformer_engine"), default="auto")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="default: what a run chooses")
    parser.add_argument("--recompute-modules", help="of --recompute selective, with commas between")
    parser.add_argument("--max-tokens", type=int, help="tokens of a micro-batch; default: what a run chooses")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--model", type=Path, help="keep the checkpoint in this folder, or take it from there")


def add_batch(parser: Any) -> None:
    """Options of an update's mini-batch; parser may be a group of options."""
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--sample-tokens", type=int, default=1024)
    parser.add_argument("--spread", action="store_true", help="lengths from an eighth of --sample-tokens to all of it")
    parser.add_argument("--float32", action="store_true")


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Overrides for the options of add_model(); what was not given stays open, for the run to choose."""
    megatron = "trainer.policy.megatron_config"
    modules = {"none": "[]", "selective": f"[{args.recompute_modules or 'core_attn'}]"}.get(args.recompute, "null")
    recompute = [
        f"{megatron}.recompute_granularity={'null' if args.recompute == 'none' else args.recompute}",
        f"{megatron}.recompute_modules={modules}",
    ]
    return [
        f"trainer.placement.policy_num_gpus_per_node={args.gpus}",
        f"trainer.policy.model.lora.rank={args.lora}",
        f"{megatron}.transformer_impl={args.impl}",
        f"{megatron}.tensor_model_parallel_size={args.tp}",
        f"{megatron}.pipeline_model_parallel_size={args.pp}",
        f"{megatron}.virtual_pipeline_model_parallel_size={'null' if args.vpp is None else args.vpp}",
        f"{megatron}.context_parallel_size={args.cp}",
        f"{megatron}.expert_model_parallel_size={args.ep}",
        *(recompute if args.recompute else []),
        *([f"trainer.max_tokens_per_microbatch={args.max_tokens}"] if args.max_tokens else []),
    ]


def layout(args: argparse.Namespace) -> tuple[MegatronConfig, int]:
    """Layout, and tokens of a micro-batch, of an update of add_batch()'s samples: what a run on this GPU chooses where
    options are not given; without a GPU no recomputation, and 8,192 tokens."""
    samples, prompt = args.samples // 8, max(1, args.sample_tokens // 8)
    config: RunConfig = load_config(
        [
            *("trainer.policy.model.path=model", "data.train_data=[none.jsonl]", "generator.n_samples_per_prompt=8"),
            *(f"trainer.train_batch_size={samples or 1}", f"trainer.policy_mini_batch_size={samples or 1}"),
            *(f"trainer.bf16={str(not args.float32).lower()}", "trainer.algorithm.use_kl_loss=false"),
            f"trainer.max_prompt_length={prompt}",
            f"generator.sampling_params.max_generate_length={args.sample_tokens - prompt}",
            *overrides_of(args),
        ]
    )
    if kind := this_device():
        models = {"model": model_config(args.shape, args.layers)}
        config = chosen(Inputs(config, models, kind, workload_of(config))).config
    megatron = config.trainer.policy.megatron_config
    megatron = replace(megatron, recompute_granularity=megatron.recompute)
    return megatron, config.trainer.max_tokens_per_microbatch or 8192


def _write_model(rendezvous: Any, job: tuple[str, str, int | None]) -> None:
    folder, shape, num_layers = job
    write_checkpoint(Path(folder), shape, num_layers)


def make_model(folder: Path, args: argparse.Namespace, timeout_s: float = 600.0) -> None:
    """In a process of its own, so that this one never uses the GPU, and once if several ask for the same folder.

    Raises: RuntimeError with the reason if it cannot be made, or not in time.
    """
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "model.safetensors.index.json").exists():
            run_on_ranks(_write_model, (str(folder), args.shape, args.layers), 1, timeout_s=timeout_s)


def lora_of(args: argparse.Namespace) -> LoraConfig:
    """The adapters of --lora; of rank 0, none."""
    return load_config([f"trainer.policy.model.lora.rank={args.lora}"]).trainer.policy.model.lora


def update_job(folder: Path, args: argparse.Namespace) -> Job:
    """What add_model() and add_batch() say."""
    from benchmarks.lib.update_ranks import Job

    megatron, max_tokens = layout(args)
    return Job(
        model_path=str(folder),
        megatron=megatron,
        optimizer=replace(load_config().trainer.policy.optimizer_config, lr=1e-6),
        lora=lora_of(args),
        num_samples=args.samples,
        sample_tokens=args.sample_tokens,
        spread=args.spread,
        max_tokens=max_tokens,
        bf16=not args.float32,
    )


def title(args: argparse.Namespace, what: str) -> str:
    sizes = [f"{name.upper()}={getattr(args, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(args, name) > 1]
    layers = "" if args.layers is None else f" with {args.layers} layers"
    lora = f", LoRA of rank {args.lora}" if args.lora else ""
    return f"{what}, {args.shape}{layers}{lora}, {args.gpus} policy rank(s) {' '.join(sizes)}"
