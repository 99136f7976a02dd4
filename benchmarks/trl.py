"""One GRPO step, this project against TRL's GRPOTrainer, on one machine in one run.

    python -m benchmarks.trl gpu [--steps 3] [--shape qwen3-0.6b] [--json FILE] [overrides of ours ...]
    python -m benchmarks.trl cpu [--steps 7] [--json FILE]

`gpu`, on one GPU, TRL with vLLM in colocate mode:
Both train the same model (a real shape, random weights, made on the spot) on the same prompts: 64 prompts of 128 tokens
x 8 samples of exactly 512 new tokens (the end-of-text token has an id that the model cannot draw), one optimizer step
of all 512, bfloat16, temperature 1, no KL term, no correction for the engine's logprobs, a reward that is computed in
no time. TRL is the one that this Python finds, beside the same vLLM; it runs without gradient checkpointing, weights in
bfloat16, in micro-batches of --trl-micro-batch samples, its engine asleep while it trains or not (--trl-sleep),
whichever is faster.

A step's seconds are from the end of one step to the end of the next, everything included; the first two of every run
are warm-up. The ratio is of medians.

`cpu`: lib/trl_cpu.py says what is compared there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import step
from benchmarks.lib import trl_cpu
from benchmarks.lib.main_job import REPOSITORY
from benchmarks.lib.policy_job import make_model, title
from benchmarks.lib.random_model import model_config, write_prompts
from benchmarks.lib.results import write_json
from benchmarks.lib.trl_environment import DEFAULT_FOLDER

WARM_UP = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gpu, cpu = commands.add_parser("gpu"), commands.add_parser("cpu")
    gpu.add_argument("--shape", default="qwen3-0.6b")
    gpu.add_argument("--steps", type=int, default=3, help="measured steps of each, after two")
    gpu.add_argument("--trl-micro-batch", type=int, default=32)
    gpu.add_argument("--trl-memory", type=float, default=0.35, help="share of the GPU for TRL's engine")
    gpu.add_argument("--trl-sleep", action="store_true", help="TRL's engine sleeps while it trains")
    gpu.add_argument("--trl-only", action="store_true")
    gpu.add_argument("--model", type=Path, help="keep the checkpoint in this folder, or take it from there")
    gpu.add_argument("overrides", nargs="*", help="more overrides of this project's configuration")
    cpu.add_argument("--steps", type=int, default=7, help="measured steps of each run, after two of warm-up")
    cpu.add_argument("--env", type=Path, default=DEFAULT_FOLDER, help="folder of TRL's environment")
    for command in (gpu, cpu):
        command.add_argument("--json", type=Path, help="write the result to this file")
    return parser.parse_args()


def measure_trl(folder: Path, args: argparse.Namespace, ours: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    steps = args.steps + WARM_UP
    data = scratch / "prompts.jsonl"
    write_prompts(data, ours.prompts * steps, ours.prompt_tokens, model_config(args.shape).vocab_size)
    settings = {
        "model": str(folder),
        "folder": str(scratch / "trl"),
        "prompts": [json.loads(line)["prompt"][0]["content"] for line in data.read_text().splitlines()],
        "prompts_per_step": ours.prompts,
        "samples_per_prompt": ours.samples_per_prompt,
        "max_new_tokens": ours.new_tokens,
        "lr": 1e-6,
        "micro_batch": args.trl_micro_batch,
        "threads": None,
        "options": {
            "bf16": True,
            "model_init_kwargs": {"dtype": "bfloat16"},
            "gradient_checkpointing": False,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": args.trl_memory,
            "vllm_max_model_length": ours.prompt_tokens + ours.new_tokens,
            "vllm_enable_sleep_mode": args.trl_sleep,
            # Wants the trainer's logprobs before the update, one more pass over all samples. Ours does without, too.
            "vllm_importance_sampling_correction": False,
        },
        "steps": steps,
    }
    given, result, output = scratch / "trl.json", scratch / "trl_result.json", scratch / "trl.log"
    given.write_text(json.dumps(settings))
    command = [sys.executable, str(REPOSITORY / "benchmarks/lib/trl_steps.py"), str(given), str(result)]
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    one_process |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    with output.open("w") as log:
        code = subprocess.run(command, env=os.environ | one_process, stdout=log, stderr=subprocess.STDOUT).returncode
    if code != 0:
        raise RuntimeError(f"TRL ended with exit code {code}:\n{output.read_text()[-5000:]}")
    found = json.loads(result.read_text())
    measured = found["steps_s"][WARM_UP:]
    return found | {
        "all_step_s": measured,
        "step_s": statistics.median(measured),
        "median_generate_s": statistics.median(found["generate_s"][WARM_UP:]),
        "settings": settings["options"],
    }


def measure_gpu(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    counts = ["--steps", str(args.steps), "--warm-up", str(WARM_UP)]
    colocated = ["--colocate", *counts, "--shape", args.shape]
    ours = step.arguments([*colocated, *args.overrides])
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch, "model")
        make_model(folder, ours)
        if not args.trl_only:
            heading = {"title": title(ours, "GRPO step, colocated")}
            result["ours"] = heading | step.measure_steps(folder, ours, Path(scratch))
            step.show(result["ours"], console)
            write_json(args.json, result)  # is not lost if TRL fails
        result["trl"] = measure_trl(folder, args, ours, Path(scratch))
    return result


def show_gpu(result: dict[str, Any], console: Console) -> None:
    trl = result["trl"]
    versions = ", ".join(f"{name} {version}" for name, version in trl["versions"].items())
    console.print(
        f"TRL ({versions}): {trl['step_s']:.2f} s per step ({' '.join(f'{s:.2f}' for s in trl['all_step_s'])}), "
        f"of it generation {trl['median_generate_s']:.2f} s, "
        f"{statistics.mean(trl['mean_tokens']):.0f} tokens a response"
    )
    if "ours" in result:
        seconds = result["ours"]["step_s"]
        console.print(f"ours: {seconds:.2f} s per step, {trl['step_s'] / seconds:.2f} x as fast as TRL")


def main() -> int:
    args, console = arguments(), Console(width=120)
    if args.command == "gpu":
        result = measure_gpu(args, console)
        show_gpu(result, console)
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = trl_cpu.measure(Path(folder), args.env, args.steps, console)
        trl_cpu.print_result(result, console)
    write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
