"""One GRPO step, this project against TRL's GRPOTrainer, without a GPU (`python -m benchmarks.trl cpu`).

Both train the quickstart's model (2 layers, 0.3M parameters, float32, random weights) on the same prompts: 32 prompts
x 8 samples, one optimizer step of all 256, temperature 1, no KL term, reward = share of digits. Every response has
exactly 64 tokens on both sides: the tokenizer's end-of-text token has an id that the model has no row for, so nobody
has to be told to ignore it, and the length limit is the only stop.

TRL is the newest on the index, in an environment of its own that is made for it (--env), with transformers'
generation (its only way without a vLLM of its own). It runs as it comes (micro-batches of 8, gradient checkpointing,
bfloat16 autocast, as many threads as torch takes) and tuned: float32, no checkpointing, all 256 samples in one
micro-batch (64 took 1.7 times as long), with two threads and with one. The faster of these two is what counts. This
project runs in the layouts of LAYOUTS. Order: ours, TRL, ours again.

A step's seconds are from the end of one step to the end of the next, logging included; the first two steps of every
run are warm-up. A ratio is TRL's median over the larger of our two medians of the same layout. Run it on a quiet
machine: where cores are shared, TRL's OpenMP threads wait for each other by spinning and its steps take several times
as long with two threads (this project gives every process one).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib.main_job import REPOSITORY, machine, run_main_job
from benchmarks.lib.random_model import DIGIT_SHARE
from benchmarks.lib.trl_environment import trl_python
from skyrl_train.tasks import tiny as task

PROMPTS, SAMPLES, NEW_TOKENS, LR = 32, 8, 64, 3e-4
WARM_UP_STEPS = 2
LAYOUTS = {"PP=2 (the quickstart's)": (2, 2, 1), "one policy rank": (1, 1, 1), "DP=2, two engines": (2, 1, 2)}
"""Name -> policy ranks, pipeline stages, engines."""
TrlSettings = tuple[int, int | None, dict[str, bool]]
"""Samples of a micro-batch, threads (None: as many as torch takes), options of GRPOConfig."""
TUNED = {"gradient_checkpointing": False, "bf16": False}
TRL_RUNS: dict[str, TrlSettings] = {
    "tuned, two threads": (256, 2, TUNED),
    "tuned, one thread": (256, 1, TUNED),
    "as it comes": (8, None, {}),
}


def write_model(folder: Path) -> None:
    """Random weights, and a tokenizer whose end-of-text token the model cannot draw."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config, tokenizer = task.model_config(), task.tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    assert tokenizer.eos_token_id == config.vocab_size == len(task.VOCABULARY)
    config.eos_token_id = tokenizer.eos_token_id
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def our_rows(count: int) -> list[task.Row]:
    return [row | {"env_class": DIGIT_SHARE} for row in task.addition_rows(seed=0)[0][:count]]


def run_ours(folder: Path, model: Path, data: Path, layout: tuple[int, int, int], steps: int) -> dict[str, Any]:
    ranks, stages, engines = layout
    job = run_main_job(
        folder,
        [
            "+experiment=quickstart",
            "trainer.prepare=null",
            f"data.train_data=[{data}]",
            f"environment.env_class={DIGIT_SHARE}",
            "data.val_data=[]",
            f"trainer.policy.model.path={model}",
            f"trainer.max_training_steps={steps}",
            "trainer.ckpt_interval=-1",
            f"trainer.train_batch_size={PROMPTS}",
            f"trainer.policy_mini_batch_size={PROMPTS}",
            f"trainer.max_tokens_per_microbatch={PROMPTS * SAMPLES * (NEW_TOKENS + 8) // 4}",
            f"trainer.policy.optimizer_config.lr={LR}",
            f"trainer.placement.policy_num_gpus_per_node={ranks}",
            f"trainer.policy.megatron_config.pipeline_model_parallel_size={stages}",
            f"generator.num_inference_engines={engines}",
            f"generator.n_samples_per_prompt={SAMPLES}",
            f"generator.sampling_params.max_generate_length={NEW_TOKENS}",
        ],
    )
    first = WARM_UP_STEPS + 1
    return {
        "steps_s": job.step_walls_s(first),
        "median_s": statistics.median(job.step_walls_s(first)),
        "mean_tokens": statistics.mean(row["generate/avg_num_tokens"] for row in job.steps(first)),
        "phases_s": job.median_phases_s(first),
    }


def run_trl(
    python: Path, folder: Path, model: Path, prompts: list[str], chosen: TrlSettings, steps: int
) -> dict[str, Any]:
    folder.mkdir()
    micro_batch, threads, options = chosen
    settings = {
        "model": str(model),
        "folder": str(folder),
        "prompts": prompts,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_new_tokens": NEW_TOKENS,
        "lr": LR,
        "micro_batch": micro_batch,
        "threads": threads,
        "options": {"use_cpu": True, "model_init_kwargs": {"dtype": "float32"}} | options,
        "steps": steps,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    script = REPOSITORY / "benchmarks/lib/trl_steps.py"
    hidden = {"PYTHONPATH", "OMP_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"HF_HUB_OFFLINE": "1"}
    with (folder / "output.log").open("w") as log:
        command = [str(python), str(script), str(folder / "settings.json"), str(folder / "result.json")]
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder).returncode
    if code != 0:
        raise RuntimeError(f"TRL ended with exit code {code}:\n{(folder / 'output.log').read_text()[-3000:]}")
    result = json.loads((folder / "result.json").read_text())
    measured = result["steps_s"][WARM_UP_STEPS:]
    return result | {
        "settings": {"micro_batch": micro_batch, "threads": threads, "options": options},
        "all_steps_s": result["steps_s"],
        "steps_s": measured,
        "median_s": statistics.median(measured),
        "mean_tokens": statistics.mean(result["mean_tokens"]),
        "phases_s": {"generate": statistics.median(result["generate_s"][WARM_UP_STEPS:])},
    }


def measure(folder: Path, environment: Path, steps: int, console: Console) -> dict[str, Any]:
    python = trl_python(environment)
    model, data = folder / "model", folder / "train.jsonl"
    write_model(model)
    rows = our_rows(PROMPTS * (steps + WARM_UP_STEPS))
    task.write_rows(data, rows)
    prompts = [row["prompt"][0]["content"] for row in rows]
    total = steps + WARM_UP_STEPS
    ours: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}

    def our_turn(turn: int) -> None:
        for index, (name, layout) in enumerate(LAYOUTS.items()):
            ours[name].append(run_ours(folder / f"ours-{turn}-{index}", model, data, layout, total))
            console.print(f"ours, {name}: {ours[name][-1]['median_s']:.2f} s per step", highlight=False)

    before = machine()
    our_turn(0)
    trl = {}
    for index, (name, chosen) in enumerate(TRL_RUNS.items()):
        trl[name] = run_trl(python, folder / f"trl-{index}", model, prompts, chosen, total)
        console.print(f"TRL, {name}: {trl[name]['median_s']:.2f} s per step", highlight=False)
    our_turn(1)
    fastest = min(trl, key=lambda name: trl[name]["median_s"])
    ratios = {
        name: {kind: trl[kind]["median_s"] / max(one["median_s"] for one in runs) for kind in (fastest, "as it comes")}
        for name, runs in ours.items()
    }
    return {"machine": before, "ours": ours, "trl": trl, "ratios": ratios}


def print_result(result: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result["trl"]["as it comes"]["versions"].items())
    table = Table(
        title=f"one GRPO step: {PROMPTS} prompts x {SAMPLES} samples x {NEW_TOKENS} tokens, "
        f"{result['machine']['cores']} cores"
    )
    for name in ("", "median s", "min", "max", "tokens", "generate", "train", "sync"):
        table.add_column(name, justify="left" if name == "" else "right")

    def row(name: str, run: dict[str, Any]) -> None:
        shown = [run["phases_s"].get(phase) for phase in ("generate", "policy_train", "sync_weights")]
        times = [f"{value:.2f}" for value in (run["median_s"], min(run["steps_s"]), max(run["steps_s"]))]
        table.add_row(
            name, *times, f"{run['mean_tokens']:.1f}", *("" if value is None else f"{value:.2f}" for value in shown)
        )

    for turn, when in enumerate(("before", "after")):
        for name, runs in result["ours"].items():
            row(f"ours, {name}, {when}", runs[turn])
    for name, run in result["trl"].items():
        row(f"TRL, {name}", run)
    console.print(table)
    console.print(f"TRL's environment: {versions}; load before: {result['machine']['load_before']}", highlight=False)
    for name, ratios in result["ratios"].items():
        told = " and ".join(f"{ratio:.2f} x as fast as TRL ({kind})" for kind, ratio in ratios.items())
        console.print(f"{name}: {told}", highlight=False)
