"""How does each estimator, loss and correction learn the quickstart? Prints the table of docs/algorithms.md.

    python -m benchmarks.algorithms [METHOD ...] [--steps 20] [--seeds 1 2 3] [--folder FOLDER] [--overrides KEY=VALUE]

Every run starts from the same warm-started model, of the first seed, on the same processes (lib/shared_runs.py); `gae`,
with its critic, has processes of its own. Columns: mean reward of the first and the last three steps, the largest ratio
of the current to the old probability of a token, the time of a step against that of `regular`, and the number of seeds
that are averaged. Results are kept in the folder: what is there is not run again, so a table can be continued.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

import skyrl_train
from benchmarks.lib.shared_runs import Rows, run_all
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, LOSSES
from skyrl_train.config import Config
from skyrl_train.entrypoints.command import guarded

A = "trainer.algorithm"
REGULAR, CRITIC = "regular", "gae"
TIGHT = [f"{A}.eps_clip_low=3e-4", f"{A}.eps_clip_high=4e-4", f"{A}.loss_reduction=sequence_mean"]
NO_GROUPS = ["generator.n_samples_per_prompt=1"]
ONE_UPDATE = ["trainer.policy_mini_batch_size=128"]
"""A step of the optimizer per batch, for objectives without a ratio to the policy that sampled."""
NAMED = [
    *("trainer.prepare=benchmarks.lib.named_addition:prepare", "data.train_data=[quickstart/named.jsonl]"),
    "environment.env_class=benchmarks.lib.named_addition:NamedAddition",
]
OWN = {
    "gpg": [f"{A}.policy_loss_type=reinforce", *ONE_UPDATE],
    "reinforce": ONE_UPDATE,
    "gdpo": NAMED,
    "remax": [*NO_GROUPS, "trainer.train_batch_size=1024", "trainer.policy_mini_batch_size=512"],
    "gspo": TIGHT,
    "gmpo": [f"{A}.eps_clip_low=0.4", f"{A}.eps_clip_high=0.4", f"{A}.loss_reduction=sequence_mean"],
    "sapo": [f"{A}.loss_reduction=sequence_mean"],
    "kl_cov": [f"{A}.kl_cov.kl_cov_frac=0.002"],
    "gae": [f"{A}.lambd=0.95", "trainer.critic.optimizer_config.lr=1.0e-3"],
}
"""Values that the paper of a method uses, where they are not the defaults; what a method needs."""
LEFT_OUT = {"cross_entropy", "zero"}
"""Fine-tuning; distillation alone."""
SHOWN_STEPS = 3
REWARD, RATIO, SECONDS = "reward/avg_raw_reward", "policy/ratio_max", "timing/step"


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    method: str
    seed: int
    first: float
    """Mean reward of the first steps."""
    last: float
    ratio: float
    """Largest, of any token."""
    step_s: float


def overrides_of() -> dict[str, list[str]]:
    """Method -> its overrides."""
    found = {REGULAR: [f"{A}.policy_loss_type={REGULAR}"]}
    found |= {name: [f"{A}.advantage_estimator={name}"] for name in ADVANTAGES}
    found |= {name: [f"{A}.policy_loss_type={name}"] for name in LOSSES}
    found |= {name: [f"{A}.corrections=[{name}]"] for name in CORRECTIONS}
    return {name: own + OWN.get(name, []) for name, own in found.items() if name not in LEFT_OUT}


def config_of(method: str, own: Sequence[str], steps: int, seed: int, extra: Sequence[str]) -> Config:
    name = f"{method.replace('@', '_at_').replace('+', 'p')}_{seed}"
    return skyrl_train.load_config(
        [
            *(f"trainer.run_name={name}", f"trainer.seed={seed}", f"trainer.max_training_steps={steps}"),
            *("trainer.eval_before_train=false", "trainer.eval_interval=-1", "data.val_data=[]"),
            *("trainer.ckpt_interval=-1", "trainer.hf_save_interval=0", "trainer.logger=[jsonl]"),
            *("trainer.log_samples_interval=-1", *own, *extra),
        ],
        experiment="quickstart",
    )


def result_of(method: str, seed: int, rows: Rows) -> Result:
    rewards = [row[REWARD] for row in rows]
    return Result(
        method,
        seed,
        statistics.mean(rewards[:SHOWN_STEPS]),
        statistics.mean(rewards[-SHOWN_STEPS:]),
        max(row.get(RATIO, 1.0) for row in rows),
        statistics.median(row[SECONDS] for row in rows[1:]),
    )


def table_of(results: Sequence[Result], methods: Sequence[str]) -> str:
    """Means over seeds; the time is the median ratio to the run of `regular` with the same seed."""
    regular = {result.seed: result.step_s for result in results if result.method == REGULAR}
    lines = ["| method | reward, first steps | reward, last steps | largest ratio | step time | seeds |"]
    lines += ["|---|---|---|---|---|---|"]
    for method in methods:
        own = [result for result in results if result.method == method]
        if own:
            first, last = (statistics.mean(values) for values in zip(*((r.first, r.last) for r in own), strict=True))
            times = [result.step_s / regular[result.seed] for result in own if result.seed in regular]
            time = f"{statistics.median(times):.2f}" if times else ""
            ratio = max(result.ratio for result in own)
            lines.append(f"| `{method}` | {first:.3f} | {last:.3f} | {ratio:.2f} | {time} | {len(own)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the quickstart with each estimator, loss and correction.")
    parser.add_argument("methods", nargs="*", help="names; all by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", help="where the runs and their results are; a temporary one by default")
    parser.add_argument("--overrides", nargs="*", default=[], help="of every run")
    arguments = parser.parse_args()
    table = overrides_of()
    if unknown := [name for name in arguments.methods if name not in table]:
        parser.error(f"unknown methods: {', '.join(unknown)}. They are {', '.join(table)}")
    os.chdir(arguments.folder or tempfile.mkdtemp(prefix="algorithms_"))
    file = Path("results.jsonl")
    lines = file.read_text().splitlines() if file.exists() else []
    results = [Result(**json.loads(line)) for line in lines]

    def note(method: str, seed: int, rows: Rows) -> None:
        results.append(result_of(method, seed, rows))
        with file.open("a") as out:
            out.write(json.dumps(asdict(results[-1])) + "\n")

    there = {(result.method, result.seed) for result in results}
    chosen = list(dict.fromkeys([REGULAR, *(arguments.methods or table)]))
    left = [(name, seed) for seed in arguments.seeds for name in chosen if (name, seed) not in there]
    configs = {
        (name, seed): config_of(name, table[name], arguments.steps, seed, arguments.overrides) for name, seed in left
    }
    alone = [[run] for run in left if run[0] == CRITIC]

    def work() -> int:
        for group in filter(None, [[run for run in left if run[0] != CRITIC], *alone]):
            run_all({run: configs[run] for run in group}, lambda run, rows: note(*run, rows))
        print(table_of(results, list(table)))
        return 0

    return guarded(work, Console())


if __name__ == "__main__":
    sys.exit(main())
