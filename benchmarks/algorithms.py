"""How does each estimator, loss and correction learn the quickstart? Prints the table of docs/algorithms.md.

    python -m benchmarks.algorithms [METHOD ...] [--steps 20] [--seeds 1 2 3] [--folder FOLDER] [--overrides KEY=VALUE]

Every method starts from the same warm-started model, of the first seed, and runs alone, one after another in this
process. Columns: mean reward of the first and the last three steps, the largest ratio of the current to the old
probability of a token, and the time of a step against that of `regular`; the mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import skyrl_train
from skyrl_train.algorithms.tables import ADVANTAGES, CORRECTIONS, LOSSES

A = "trainer.algorithm"
REGULAR = "regular"
TIGHT = [f"{A}.eps_clip_low=3e-4", f"{A}.eps_clip_high=4e-4", f"{A}.loss_reduction=sequence_mean"]
OWN = {
    "gpg": [f"{A}.policy_loss_type=reinforce"],
    "gspo": TIGHT,
    "gmpo": [f"{A}.eps_clip_low=0.4", f"{A}.eps_clip_high=0.4", f"{A}.loss_reduction=sequence_mean"],
    "sapo": [f"{A}.loss_reduction=sequence_mean"],
    "kl_cov": [f"{A}.kl_cov.kl_cov_frac=0.002"],
}
"""Values that the paper of a method uses, where they are not the defaults."""
LEFT_OUT = {"cross_entropy", "gae", "gdpo"}
"""Fine-tuning; a critic has its own experiment; the quickstart has one reward."""
SHOWN_STEPS = 3
REWARD, RATIO, SECONDS = "reward/avg_raw_reward", "policy/ratio_max", "timing/step"
Row = tuple[float, float, float, float]
"""First reward, last reward, largest ratio, seconds of a step."""


def overrides_of() -> dict[str, list[str]]:
    """Method -> its overrides."""
    found = {REGULAR: [f"{A}.policy_loss_type={REGULAR}"]}
    found |= {name: [f"{A}.advantage_estimator={name}"] for name in ADVANTAGES}
    found |= {name: [f"{A}.policy_loss_type={name}"] for name in LOSSES}
    found |= {name: [f"{A}.corrections=[{name}]"] for name in CORRECTIONS}
    return {name: own + OWN.get(name, []) for name, own in found.items() if name not in LEFT_OUT}


def measure(method: str, own: Sequence[str], steps: int, seed: int, extra: Sequence[str]) -> Row:
    """Train in the current folder."""
    name = f"{method.replace('@', '_at_').replace('+', 'p')}_{seed}"
    config = skyrl_train.load_config(
        [
            *(f"trainer.run_name={name}", f"trainer.seed={seed}", f"trainer.max_training_steps={steps}"),
            *("trainer.eval_before_train=false", "trainer.eval_interval=-1", "data.val_data=[]"),
            *("trainer.ckpt_interval=-1", "trainer.hf_save_interval=0", "trainer.logger=[jsonl]"),
            *own,
            *extra,
        ],
        experiment="quickstart",
    )
    rows = [json.loads(line) for line in (skyrl_train.run(config) / "metrics.jsonl").read_text().splitlines()]
    rewards = [row[REWARD] for row in rows]
    return (
        statistics.mean(rewards[:SHOWN_STEPS]),
        statistics.mean(rewards[-SHOWN_STEPS:]),
        max(row.get(RATIO, 1.0) for row in rows),
        statistics.median(row[SECONDS] for row in rows[1:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the quickstart with each estimator, loss and correction.")
    parser.add_argument("methods", nargs="*", help="names; all by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", help="where the runs are; a temporary one by default")
    parser.add_argument("--overrides", nargs="*", default=[], help="of every run")
    arguments = parser.parse_args()
    table = overrides_of()
    if unknown := [name for name in arguments.methods if name not in table]:
        parser.error(f"unknown methods: {', '.join(unknown)}. They are {', '.join(table)}")
    os.chdir(arguments.folder or tempfile.mkdtemp(prefix="algorithms_"))
    Path("table.md").write_text("")
    chosen = list(dict.fromkeys([REGULAR, *(arguments.methods or table)]))
    base = 1.0
    lines = [
        "| method | reward, first steps | reward, last steps | largest ratio | step time |",
        "|---|---|---|---|---|",
    ]
    for name in chosen:
        rows = [measure(name, table[name], arguments.steps, seed, arguments.overrides) for seed in arguments.seeds]
        first, last, ratio, seconds = (statistics.mean(values) for values in zip(*rows, strict=True))
        base = seconds if name == REGULAR else base
        lines.append(f"| `{name}` | {first:.3f} | {last:.3f} | {ratio:.2f} | {seconds / base:.2f} |")
        Path("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
