"""Steps of synchronous and streaming runs of a real model shape with random weights, on the same processes.

    python -m benchmarks.streaming --shape qwen3-0.6b [--steps 8] [--cases fixed spread] [--json FILE] [OVERRIDES ...]

Policy and engine have a GPU each. Cases: `fixed`, all responses of --new-tokens tokens; `spread`, lengths from 64 to
--longest tokens, uniform in their logarithm and the same in all runs. Each case runs with streaming at each --staleness
and with the on-policy source, at last, because the engines have the slots that the first run asks for. Columns: seconds
from one step's metrics to the next's (mean, after --warm-up steps and before the last two: a streaming run generates
its first batches before its first step and none during its last steps; after one step of an on-policy run), seconds of
generation and update, the fractions of a step in which the trainer waited for groups and engines had no request,
staleness of the tokens (mean, max), seconds of a weight sync, during which the engines pause, and of that the
milliseconds that are not the transfer. A line below compares each streaming run with the on-policy run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

import skyrl_train
from benchmarks.lib.main_job import WALL_TIME
from benchmarks.lib.policy_job import add_model, make_model, overrides_of
from benchmarks.lib.random_model import DIGIT_SHARE, model_config, write_prompts
from benchmarks.lib.results import write_json
from benchmarks.lib.shared_runs import Rows, run_all
from benchmarks.lib.spread_lengths import SPREAD_LENGTHS
from skyrl_train.config import Config
from skyrl_train.entrypoints.command import guarded

HEADINGS = (
    *("run", "step s", "tokens", "generate s", "update s"),
    *("trainer waits", "engines idle", "staleness", "sync s", "beyond transfer ms"),
)
SHORTEST = 64
PROMPT_TOKENS, SAMPLES_PER_PROMPT = 128, 8


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    lengths: str
    """fixed or spread."""
    staleness: int | None
    """None: the on-policy source."""

    @property
    def name(self) -> str:
        source = "on_policy" if self.staleness is None else f"staleness_{self.staleness}"
        return f"{self.lengths}_{source}"

    def steps(self, args: argparse.Namespace) -> tuple[int, int, int]:
        """Before those that are measured, those, and after them."""
        return (1, args.on_policy_steps, 0) if self.staleness is None else (args.warm_up, args.steps, 2)

    def overrides(self, args: argparse.Namespace) -> list[str]:
        """What differs from the other cases."""
        long = self.lengths == "spread"
        tokens = f"generator.sampling_params.max_generate_length={args.longest if long else args.new_tokens}"
        spread = [f"generator.rollout={SPREAD_LENGTHS}", f"extra.shortest={SHORTEST}"] if long else []
        stale = ["trainer.source=streaming", f"trainer.max_staleness={self.staleness}"]
        return [f"trainer.run_name={self.name}", tokens, *spread, *(stale if self.staleness is not None else [])]


def config_of(case: Case, args: argparse.Namespace, model: Path, data: Path) -> Config:
    return skyrl_train.load_config(
        [
            *(f"data.train_data=[{data}]", f"environment.env_class={DIGIT_SHARE}", "trainer.seed=1"),
            *(f"trainer.policy.model.path={model}", f"trainer.max_training_steps={sum(case.steps(args))}"),
            *(f"trainer.train_batch_size={args.prompts}", f"trainer.policy_mini_batch_size={args.prompts}"),
            *(*overrides_of(args), f"trainer.max_prompt_length={PROMPT_TOKENS}"),
            *("trainer.log_samples_interval=-1", "trainer.ckpt_interval=-1", "trainer.hf_save_interval=0"),
            *("trainer.logger=[jsonl]", "trainer.algorithm.use_kl_loss=false"),
            *(f"generator.n_samples_per_prompt={SAMPLES_PER_PROMPT}", *case.overrides(args), *args.overrides),
        ]
    )


def measured(rows: Rows, before: int, steps: int) -> dict[str, float]:
    """Mean time of the steps after those before, and medians of their metrics."""
    kept = rows[before : before + steps]
    walls = [later[WALL_TIME] - row[WALL_TIME] for row, later in pairwise([rows[before - 1], *kept])]
    names = [name for name in kept[-1] if name.startswith(("timing/", "async/", "perf/"))]
    medians = {name: statistics.median(row[name] for row in kept if name in row) for name in names}
    return {"step_s": statistics.mean(walls), "tokens": statistics.median(map(mean_tokens, kept))} | medians


def mean_tokens(row: Mapping[str, Any]) -> float:
    return float(row["generate/avg_num_tokens"])


def line_of(case: Case, found: Mapping[str, float]) -> str:
    """A row of the table."""
    cells = [
        *(case.name, f"{found['step_s']:.2f}", f"{found['tokens']:.0f}"),
        *(f"{found.get(f'timing/{name}', 0.0):.2f}" for name in ("generate", "policy_train")),
        *(f"{found.get(f'async/{name}', 0.0):.1%}" for name in ("trainer_wait_share", "engine_idle_share")),
        f"{found.get('async/staleness_mean', 0.0):.2f} ({found.get('async/staleness_max', 0.0):.0f})",
        f"{found['timing/sync_weights']:.3f}",
        f"{1000 * found['perf/sync_overhead_s']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a streaming run")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--on-policy-steps", type=int, default=3, help="measured steps of an on-policy run, after one")
    parser.add_argument("--cases", nargs="+", choices=("fixed", "spread"), default=["spread", "fixed"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[1])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("overrides", nargs="*", help="more overrides of the configuration")
    return parser.parse_args(given)


def main() -> int:
    args = arguments()
    os.chdir(tempfile.mkdtemp(prefix="streaming_"))
    model, data = args.model or Path("model").resolve(), Path("prompts.jsonl").resolve()
    make_model(model, args)
    vocabulary = model_config(args.shape, args.layers).vocab_size
    write_prompts(data, args.prompts * (args.warm_up + args.steps + 4), PROMPT_TOKENS, vocabulary)
    # The engines are started for the first run: its responses are the longest, and the most are in flight.
    lengths, sources = sorted(args.cases, reverse=True), [*sorted(args.staleness, reverse=True), None]
    cases = {case.name: case for length in lengths for case in (Case(length, source) for source in sources)}
    configs = {name: config_of(case, args, model, data) for name, case in cases.items()}
    results: dict[str, dict[str, float]] = {}

    def note(name: str, rows: Rows) -> None:
        results[name] = measured(rows, *cases[name].steps(args)[:2])
        print(line_of(cases[name], results[name]), flush=True)
        write_json(args.json, {"arguments": {key: str(value) for key, value in vars(args).items()}} | results)

    def work() -> int:
        print("| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|", sep="\n", flush=True)
        run_all(configs, note)
        for name, case in cases.items():
            if case.staleness is not None:
                faster = results[Case(case.lengths, None).name]["step_s"] / results[name]["step_s"]
                print(f"{name}: {faster:.2f} times as fast as on policy")
        return 0

    return guarded(work, Console())


if __name__ == "__main__":
    sys.exit(main())
