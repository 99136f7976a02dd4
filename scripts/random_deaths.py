"""Kill, stop and signal random processes of tiny runs at random times, and resume each until it has finished.

    python -m scripts.random_deaths [--runs 10] [--seed 1] [--vllm]

Engines are those of examples/custom, which start sooner, unless --vllm. A run has eight steps, its checkpoints one
each. Prints a line per run: its kind, and for each start what was done to it, its exit code, and the rows in
metrics.jsonl then. A fault is a start that leaves processes, does not end in time, prints a stack, or fails of a death
that it should survive; and a run without the metrics of a step, without a report, or with groups that were trained
twice or never. Exit code 1 if there was one; the folders of such runs stay.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.jobs import WITHOUT_VLLM, Job, running, write_world

NUM_STEPS, NUM_GROUPS = 8, 64
EVALUATED = ("data.val_data=[rows.jsonl]", "trainer.eval_before_train=false")
STREAMING = ("trainer.source=streaming", *EVALUATED)
KINDS = {
    "on-policy": (*EVALUATED, "trainer.eval_interval=1", "trainer.hf_save_interval=2"),
    "oversampling": (*EVALUATED, "trainer.eval_interval=2", "trainer.over_sampling_batch_size=12"),
    "streaming": (*STREAMING, "trainer.eval_interval=1"),
    "streaming, aborting": (*STREAMING, "generator.pause_mode=abort", "generator.num_inference_engines=2"),
    "streaming, own engine for evaluations": (
        *(*STREAMING, "trainer.eval_interval=1"),
        *("generator.num_inference_engines=2", "generator.eval_num_engines=1"),
    ),
    "critic": ("trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=model"),
    "LoRA": ("trainer.policy.model.lora.rank=4",),
    "PP2": (
        "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
        "trainer.placement.policy_num_gpus_per_node=2",
    ),
}
COMMON = (
    *(f"trainer.max_training_steps={NUM_STEPS}", "trainer.epochs=2", "trainer.ckpt_interval=1", "trainer.run_name=r"),
    *("trainer.timeout_s=60", "generator.weight_sync_timeout_s=50"),
)
SURVIVED = ("kill engine-0", "stop engine-0")
ACTIONS = (*SURVIVED, "kill driver", "term driver", "interrupt all", "kill policy-0", "stop policy-0")
NUM_DEATHS = 4
"""Starts to which something is done; the next one is left alone."""
CODES = {"kill driver": -signal.SIGKILL, "term driver": 128 + signal.SIGTERM, "interrupt all": 128 + signal.SIGINT}
"""Exit codes beside 0, of a run that had just ended, and 1."""
STARTING_SHARE, STARTING_S, STEP_S = 0.25, 10.0, 0.8
"""Share of actions that may come before the first step, the latest of those, and the latest of others after a step."""
END_S = 300.0


@dataclass
class Story:
    """What happened to a run."""

    starts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def act(job: Job, action: str) -> bool:
    """Returns: whether there was a process to do it to."""
    what, who = action.split()
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(what, signal.SIGINT)
    try:
        if who == "driver":
            job.process.send_signal(number)
        elif who == "all":
            job.interrupt(number)
        else:
            job.find(who).send_signal(number)
    except (ValueError, ProcessLookupError):  # it has not started, or has ended
        return False
    return True


def wait_for_moment(job: Job, chance: random.Random) -> None:
    if chance.random() < STARTING_SHARE:
        time.sleep(chance.uniform(0, STARTING_S))
        return
    before, deadline = len(job.metrics), time.monotonic() + END_S
    while job.process.poll() is None and len(job.metrics) == before and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, STEP_S))


def start_once(world: Path, overrides: tuple[str, ...], chance: random.Random | None, story: Story) -> tuple[int, Job]:
    """One start of the run. Args: chance: None to leave it alone."""
    with running(world, *COMMON, *overrides) as job:
        action = ""
        if chance is not None:
            wait_for_moment(job, chance)
            action = chance.choice(ACTIONS)
            if job.process.poll() is not None or not act(job, action):
                action = ""
        code = job.wait(END_S)
        story.starts.append(f"{action or 'nothing'}: {code}, {len(job.metrics)} rows")
        story.faults += [f"after {story.starts[-1]}: {fault}" for fault in faults_of(job, action, code)]
        return code, job


def faults_of(job: Job, action: str, code: int) -> list[str]:
    """What is wrong with a start that has ended."""
    found = [f"left {left}" for left in job.left_behind()]
    if "Traceback" in job.output:
        found.append(f"a stack\n{job.output}")
    if code not in (0, 1, CODES.get(action)):
        found.append(f"an unexpected exit code\n{job.output}")
    may_fail = action.endswith("policy-0") or (action in SURVIVED and "did not start" in job.output)
    if code == 1 and not (may_fail and "error: " in job.output):
        found.append(f"an unexpected failure\n{job.output}")
    return found


def faults_at_end(job: Job, code: int) -> list[str]:
    """What is wrong with a run after its last start."""
    if code != 0:
        return [f"the last start ended with exit code {code}"]
    found, record = [], json.loads((job.run_dir / "run.json").read_text())
    steps = {int(row["trainer/global_step"]) for row in job.metrics if "timing/step" in row}
    if steps != set(range(1, NUM_STEPS + 1)):
        found.append(f"metrics of steps {sorted(steps)} alone")
    if record["status"] != "finished" or not (job.run_dir / "report.html").exists():
        found.append(f"status {record['status']}, or no report")
    checkpoint = json.loads((job.run_dir / f"checkpoints/global_step_{NUM_STEPS}/checkpoint.json").read_text())
    ledger = checkpoint["state"]["source"].get("ledger")
    if ledger is not None and (ledger["trained"], ledger["generated"]) != (NUM_GROUPS, NUM_GROUPS):
        found.append(f"groups {ledger}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", action="store_true")
    arguments = parser.parse_args()
    chance, has_faults = random.Random(arguments.seed), False
    for _ in range(arguments.runs):
        name, story, folder = chance.choice([*KINDS]), Story(), Path(tempfile.mkdtemp(prefix="deaths_"))
        world = write_world(folder / "world")
        for number in range(NUM_DEATHS + 1):
            overrides = (*KINDS[name], *(() if arguments.vllm else (WITHOUT_VLLM,)))
            overrides += ("trainer.resume_mode=latest",) if number else ()
            code, job = start_once(world, overrides, chance if number < NUM_DEATHS else None, story)
            if code == 0:
                break
        story.faults += faults_at_end(job, code)
        print(name, "·", "; ".join(story.starts), "·", "FAULT" if story.faults else "ok", flush=True)
        for fault in story.faults:
            print(f"  {fault} ({folder})", flush=True)
        has_faults |= bool(story.faults)
        if not story.faults:
            shutil.rmtree(folder)
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
