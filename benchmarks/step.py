"""Speed of a training step of a real model shape with random weights, on the GPUs of this machine.

    python -m benchmarks.step --update-only --shape qwen3-4b
    python -m benchmarks.step --update-only --shape qwen3-4b --parts --trace kernels.txt
    python -m benchmarks.step --update-only --shape qwen3-4b --logits
    python -m benchmarks.step --update-only --shape qwen3-4b --pp 2 --gpus 2 --samples 128
    python -m benchmarks.step --methods --shape tiny --samples 16 --sample-tokens 256 --float32
    python -m benchmarks.step --shape qwen3-0.6b --colocate
    python -m benchmarks.step --shape qwen3-0.6b trainer.source=streaming
    python -m benchmarks.step --shape qwen3-4b --colocate --prompts 32 --new-tokens 2048 --engine-alone

With --update-only: MegatronPolicy.update on local ranks, without engines, in turns with a bare Megatron loop over the
same micro-batches (overhead: the median of their ratios); samples of --sample-tokens, micro-batches of --max-tokens.
Tokens of a micro-batch and recomputation are those that a run on this GPU chooses, unless given.
--logits compares updates that keep the logits for backward with updates that compute them again, in turns.
--parts (lib/update_parts.py; of each part the slowest rank) and --trace (lib/kernel_shares.py; rank 0) say where the
time of an update goes.

With --methods: what each loss and correction adds to an update, and each estimator to a step (lib/method_cost.py):
the median of --steps ratios to `regular`.

Otherwise whole GRPO steps through the main job: 64 prompts of 128 tokens x 8 samples x 512 new tokens (every response
has exactly that length: the end-of-text token has an id that the model cannot draw), no KL term unless --kl; --gpus are
the policy's ranks and, on as many more GPUs, --engines, unless --colocate shares them. All other keys are those that a
run chooses, unless given. --engine-alone: after the job, vLLM alone generates as many tokens (lib/vllm_alone.py).

MFU: FLOPs of the model (6 per weight and token and the causal half of attention; recomputation not counted) over time
and the device's dense bfloat16 peak.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib import vllm_alone
from benchmarks.lib.main_job import run_main_job
from benchmarks.lib.policy_job import GIB, add_batch, add_model, make_model, overrides_of, title, update_job
from benchmarks.lib.random_model import DIGIT_SHARE, model_config, write_prompts
from benchmarks.lib.results import write_json
from benchmarks.lib.spread_lengths import SPREAD_LENGTHS

SHARES = ("kernel_shares", "added_to_update", "objective_of_update", "credit_of_update")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after those of warm-up")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    update = parser.add_argument_group("--update-only")
    update.add_argument("--update-only", action="store_true")
    add_batch(update)
    update.add_argument("--logits", action="store_true", help="time and memory with logits kept and computed again")
    update.add_argument("--parts", action="store_true", help="time the parts of an update too, each waited for")
    update.add_argument("--methods", action="store_true", help="compare the updates of all losses and corrections")
    update.add_argument("--trace", help="write the kernels of one update to this file, and print their shares by group")
    whole = parser.add_argument_group("whole steps")
    whole.add_argument("--engines", type=int, default=1)
    whole.add_argument("--colocate", action="store_true", help="engines on the policy's GPUs")
    whole.add_argument("--prompts", type=int, default=64)
    whole.add_argument("--prompt-tokens", type=int, default=128)
    whole.add_argument("--samples-per-prompt", type=int, default=8)
    whole.add_argument("--new-tokens", type=int, default=512)
    whole.add_argument("--shortest", type=int, help="lengths from this to --new-tokens, uniform in their logarithm")
    whole.add_argument("--engine-alone", action="store_true", help="generate with vLLM alone too")
    whole.add_argument("--kl", action="store_true", help="with a reference model and a KL term")
    whole.add_argument("overrides", nargs="*", help="more overrides of the configuration")
    return parser.parse_args(given)


def measure_update(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.lib.update_ranks import run
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    given = update_job(folder, args)
    job = replace(given, warm_up=args.warm_up, steps=args.steps, logits=args.logits, parts=args.parts, trace=args.trace)
    ranks = run_on_ranks(run, job, args.gpus, timeout_s=900)
    first = ranks[0]
    seconds, bare = statistics.median(first["update_s"]), statistics.median(first["bare_s"])
    ratios = [ours / its for ours, its in zip(first["update_s"], first["bare_s"], strict=True)]
    flops, tokens = sum(rank["flops"] for rank in ranks), sum(rank["tokens"] for rank in ranks)
    peak = first["peak_flops"]
    schedule = statistics.median(first["schedule_s"])
    idle = [1 - b / s for rank in ranks for b, s in zip(rank["busy_s"], rank["schedule_s"], strict=True)]
    num = first["micro_batches"] * (args.vpp or 1)

    def mfu(time_s: float) -> float | None:
        return None if peak is None else flops / (time_s * peak * args.gpus)

    return {
        "update_s": seconds,
        "all_update_s": first["update_s"],
        "first_update_s": first["first_update_s"],
        "bare_s": bare,
        "all_bare_s": first["bare_s"],
        "overhead": statistics.median(ratios) - 1,
        "schedule_s": schedule,
        "rest_s": seconds - schedule,
        "logprob_s": first["logprob_s"],
        "tokens_per_s": tokens / seconds,
        "mfu": mfu(seconds),
        "mfu_of_schedule": mfu(schedule),
        "bare_mfu": mfu(bare),
        "idle": statistics.mean(idle),
        "idle_in_theory": (args.pp - 1) / (num + args.pp - 1),
        "micro_batches": first["micro_batches"],
        "peak_gib": max(rank["peak_bytes"] for rank in ranks) / GIB,
        **(logits_compared([rank["logits"] for rank in ranks]) if args.logits else {}),
        "layers": "torch" if first["torch_layers"] else "transformer_engine",
        "grad_norm": next(rank["metrics"]["policy/grad_norm"] for rank in ranks if rank["metrics"]),
        "parts_s": {part: max(rank["parts_s"][part] for rank in ranks) for part in first["parts_s"]},
        "kernel_shares": first["kernel_shares"],
    }


def logits_compared(ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """Medians; the time of all ranks is the same, the peak is that of the fullest."""
    kept, again = (statistics.median(ranks[0][name]) for name in ("kept_s", "again_s"))
    ratios = [after / before for before, after in zip(ranks[0]["kept_s"], ranks[0]["again_s"], strict=True)]
    peaks = [max(max(rank[name]) for rank in ranks) / GIB for name in ("kept_peak_bytes", "again_peak_bytes")]
    return {
        "logits_kept_s": kept,
        "logits_computed_again_s": again,
        "cost_of_computing_again": statistics.median(ratios) - 1,
        "logits_kept_peak_gib": peaks[0],
        "logits_computed_again_peak_gib": peaks[1],
    }


def measure_methods(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Shares of an update of `regular`, of the slowest rank."""
    from benchmarks.lib.method_cost import comparison, run
    from skyrl_train.megatron.verify.local_ranks import run_on_ranks

    job = replace(update_job(folder, args), warm_up=args.warm_up, steps=args.steps)
    ranks = run_on_ranks(run, comparison(job), args.gpus, timeout_s=3000)
    first = ranks[0]
    regular = first["regular_s"]
    added = {name: max(statistics.median(rank["ratios"][name]) for rank in ranks) - 1 for name in first["ratios"]}
    return {
        "regular_s": regular,
        "added_to_update": added,
        "objective_of_update": {name: seconds / regular for name, seconds in first["objective_s"].items()},
        "credit_of_update": {name: seconds / regular for name, seconds in first["credit_s"].items()},
    }


def measure_steps(folder: Path, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    data = scratch / "prompts.jsonl"
    vocab_size = model_config(args.shape, args.layers).vocab_size
    total = args.warm_up + args.steps
    write_prompts(data, args.prompts * total, args.prompt_tokens, vocab_size)
    overrides = [
        f"data.train_data=[{data}]",
        f"environment.env_class={DIGIT_SHARE}",
        "data.val_data=[]",
        f"trainer.policy.model.path={folder}",
        f"trainer.max_training_steps={total}",
        f"trainer.train_batch_size={args.prompts}",
        f"trainer.policy_mini_batch_size={args.prompts}",
        f"trainer.max_prompt_length={args.prompt_tokens}",
        "trainer.log_samples_interval=-1",
        "trainer.ckpt_interval=-1",
        "trainer.hf_save_interval=0",
        "trainer.logger=[console,jsonl]",
        f"trainer.algorithm.use_kl_loss={str(args.kl).lower()}",
        *overrides_of(args),
        f"generator.num_inference_engines={args.engines}",
        f"generator.n_samples_per_prompt={args.samples_per_prompt}",
        f"generator.sampling_params.max_generate_length={args.new_tokens}",
        *(["trainer.placement.colocate_all=true"] if args.colocate else []),
        *([f"generator.rollout={SPREAD_LENGTHS}", f"+extra.shortest={args.shortest}"] if args.shortest else []),
        *args.overrides,
    ]
    job = run_main_job(scratch / "job", overrides)
    first = args.warm_up + 1
    walls = job.step_walls_s(first)
    rows = job.steps(first)
    kept = [name for name in rows[-1] if name.startswith(("perf/", "memory/", "trainer/driver", "async/"))]
    phases = job.median_phases_s(first)
    tokens = args.prompts * args.samples_per_prompt * args.new_tokens
    alone = vllm_alone.tokens_per_s(folder, data, args) if args.engine_alone else {}
    return alone | {
        "ready_s": job.ready_s,
        "step_s": statistics.median(walls),
        "all_step_s": walls,
        "phases_s": phases,
        "generated_tokens_per_s": tokens / phases["generate"],
        "neither_generate_nor_update": 1 - job.median_share(("generate", "policy_train"), first),
        "mean_response_tokens": statistics.mean(row["generate/avg_num_tokens"] for row in rows),
        "metrics": {name: statistics.median(row[name] for row in rows if name in row) for name in kept},
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("", "", title=result["title"])
    for name, value in result.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                table.add_row(f"{name}: {inner}", f"{number:.1%}" if name in SHARES else f"{number:.4g}")
        elif isinstance(value, float):
            share = name in (
                "overhead",
                "cost_of_computing_again",
                "mfu",
                "mfu_of_schedule",
                "bare_mfu",
                "idle",
                "idle_in_theory",
            )
            table.add_row(name, f"{value:.1%}" if share or name.startswith("neither") else f"{value:.4g}")
        elif isinstance(value, list):
            table.add_row(name, " ".join(f"{one:.3g}" for one in value))
        elif name != "title":
            table.add_row(name, str(value))
    console.print(table)


def main() -> int:
    args, console = arguments(), Console(width=120)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch, "model")
        make_model(folder, args)
        if args.methods:
            measured = measure_methods(folder, args)
        else:
            measured = measure_update(folder, args) if args.update_only else measure_steps(folder, args, Path(scratch))
    given = {name: str(value) for name, value in vars(args).items() if value is not None}
    what = "update" if args.update_only or args.methods else "GRPO step, colocated" if args.colocate else "GRPO step"
    result = {"title": title(args, what)} | measured
    show(result, console)
    write_json(args.json, {"arguments": given} | result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
