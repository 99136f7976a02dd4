"""Training runs as a user starts them: a process in a folder of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.job_server import SERVER, Forked
from tests.support.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
MARK = "SKYRL_TEST_JOB"
"""Variable in the environment of a job, inherited by every process that it starts, also by Ray's."""
START_S = 480
"""Longest start of a job on two busy cores, 30 s on idle ones; also how long a small job may take where processes
start slowly: the imports of one took 25 s on a host with GPUs whose packages were not compiled to bytecode."""

EXPERIMENT = """\
# @package _global_
data: {train_data: [rows.jsonl], val_data: []}
trainer:
  run_name: tiny
  logger: [console, jsonl]
  max_training_steps: 2
  train_batch_size: 8
  policy_mini_batch_size: 4
  max_tokens_per_microbatch: 96
  max_prompt_length: 16
  bf16: false
  timeout_s: 200
  policy:
    model: {path: model}
    optimizer_config: {lr: 1.0e-3}
  algorithm: {use_kl_loss: false}
generator:
  kv_cache_memory_gb: 0.0625
  n_samples_per_prompt: 4
  sampling_params: {max_generate_length: 8}
environment:
  env_class: rewards:Digits
"""
# A random model never adds right; how many digits it writes differs from sample to sample, so there is a gradient.
REWARDS = """\
import time
from pathlib import Path
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Digits(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()

    def step(self, action):
        reward = sum(c.isdigit() for c in action) / 8
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

class Slow(Digits):
    def step(self, action):
        time.sleep(0.5)
        return super().step(action)

# From the moment when a file tells it to.
class Hangs(Slow):
    def step(self, action):
        if Path("hang").exists():
            Path("hanging").touch()
            time.sleep(100_000)
        return super().step(action)
"""

# Kills a process in the n-th call of its step in the run; which, says DEATHS: {"n": "driver" or "path of its log"}.
DEADLY = """\
import itertools
import json
import os
from pathlib import Path

import psutil
from rewards import Digits
from tests.support.jobs import actor_of

CALLS = itertools.count(1)

class Deadly(Digits):
    def step(self, action):
        deaths = json.loads(os.environ.get("DEATHS", "{}"))
        if dies := deaths.get(str(next(CALLS))):
            (psutil.Process() if dies == "driver" else actor_of(Path(dies))).kill()
        return super().step(action)
"""

MAIN = "skyrl_train.entrypoints.main_base"
GREEDY_MAIN = "greedy"
"""Main program that allows greedy training samples, which are equal in every placement and after every resume. A run
refuses them: what the engine says of them is not the policy's distribution."""
GREEDY = f"""\
import sys
from skyrl_train.checks import engines
from {MAIN} import main

if __name__ == "__main__":
    engines.ALL_TOKENS.clear()
    sys.exit(main(sys.argv[1:]))
"""
GREEDILY = ("generator.sampling_params.top_k=1", "trainer.logprob_difference={warn: 1e9, fail: 1e9}")
WITHOUT_VLLM = "generator.backend=own_engine:ENGINE"
"""For jobs in which nothing depends on the engine: examples/custom's needs half the CPU seconds of vLLM to start."""


def write_world(folder: Path, num_rows: int = 32) -> Path:
    """Model, data, experiment and environments of a tiny run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n % 7}="}],
            "data_source": "sums",
            "reward_spec": {"ground_truth": str(n + n % 7)},
        }
        for n in range(num_rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "configs/experiment").mkdir(parents=True)
    (folder / "configs/experiment/tiny.yaml").write_text(EXPERIMENT)
    (folder / "rewards.py").write_text(REWARDS)
    shutil.copy(ROOT / "examples/custom/own_engine.py", folder)
    (folder / f"{GREEDY_MAIN}.py").write_text(GREEDY)
    return folder


@dataclass
class Job:
    """A running or finished job."""

    process: subprocess.Popen[bytes] | Forked
    folder: Path
    run_name: str
    output_path: Path
    mark: str
    started: float = field(default_factory=time.monotonic)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.run_name

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    @property
    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, timeout_s: float = START_S) -> int:
        """Exit code. Fails with the output if the job does not end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout_s} s:\n{self.story()}") from None

    def wait_for(self, text: str, timeout_s: float = START_S) -> None:
        """Until the console shows `text`."""
        self.wait_until(lambda: text in self.output, f"print {text!r}", timeout_s)

    def wait_for_step(self, step: int, timeout_s: float = START_S) -> None:
        """Until the console shows the metrics of `step`."""
        self.wait_for(f"\nstep {step}/", timeout_s)

    def wait_until(self, condition: object, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():  # type: ignore[operator]
            assert self.process.poll() is None, f"the job ended before it did {what}:\n{self.story()}"
            assert time.monotonic() < deadline, f"the job did not {what} within {timeout_s} s:\n{self.story()}"
            time.sleep(0.1)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """What Ctrl-C in a terminal does: the signal goes to the whole process group."""
        os.killpg(self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Every living process of the job, whatever its parent is now."""
        found = [p for p in psutil.process_iter() if _environment(p).get(MARK) == self.mark]
        if isinstance(self.process, Forked) and self.process.poll() is None:
            # For it, /proc shows the variables of the process that it was forked from.
            found.append(psutil.Process(self.process.pid))
        return found

    def find(self, name: str) -> psutil.Process:
        """The actor that writes this log file (`policy-0`, `engine-0`)."""
        return actor_of(self.run_dir / f"logs/{name}.log")

    def left_behind(self, patience_s: float = 120) -> list[str]:
        """Processes that outlive the job."""
        deadline = time.monotonic() + patience_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _left(self) -> list[str]:
        return [f"{p.pid} {' '.join(_command(p))[:150]}" for p in self.processes()]

    def story(self) -> str:
        """Console and the ends of all log files."""
        logs = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join([self.output, *logs])

    def kill(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(60)


def start(
    folder: Path,
    *overrides: str,
    experiment: str = "tiny",
    environment: dict[str, str] | None = None,
    main: str = MAIN,
) -> Job:
    """Start a job; `run_name` comes from the overrides."""
    mark = uuid.uuid4().hex
    run_name = next((o.split("=", 1)[1] for o in overrides if o.startswith("trainer.run_name=")), "tiny")
    command = [sys.executable, "-m", main, f"+experiment={experiment}", *overrides]
    return start_command(command, folder, run_name, mark, environment or {})


def start_command(command: Sequence[str], folder: Path, run_name: str, mark: str, environment: dict[str, str]) -> Job:
    output = folder / f"{run_name}.{mark[:6]}.out"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # After these two: where a machine without pip keeps its packages.
    paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables |= {"PYTHONPATH": os.pathsep.join(paths), MARK: mark, "COLUMNS": "300", **environment}
    process: subprocess.Popen[bytes] | Forked
    if list(command[:2]) == [sys.executable, "-m"] and SERVER.can_start(variables):
        process = SERVER.start(command[2], command[3:], folder, variables, output)
    else:
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
    return Job(process, folder, run_name, output, mark)


@contextmanager
def running(
    folder: Path,
    *overrides: str,
    experiment: str = "tiny",
    environment: dict[str, str] | None = None,
    main: str = MAIN,
) -> Iterator[Job]:
    """A job that is killed with everything it started if the test ends before it."""
    job = start(folder, *overrides, experiment=experiment, environment=environment, main=main)
    try:
        yield job
    finally:
        job.kill()


def run_to_end(
    folder: Path, *overrides: str, environment: dict[str, str] | None = None, main: str = MAIN
) -> tuple[int, Job]:
    """Run a job and see that it leaves nothing behind."""
    with running(folder, *overrides, environment=environment, main=main) as job:
        code = job.wait()
        assert not (left := job.left_behind()), left
        return code, job


def error_of(job: Job) -> str:
    """The error message of a failed job. Fails if a stack is shown, or another error first."""
    text = job.output
    assert "Traceback" not in text, text
    assert text.count("error: ") >= 1, text
    return text[text.index("error: ") :]


def assert_whole_steps(job: Job) -> None:
    """Every step that began is in the metrics, whole."""
    steps = [row["trainer/global_step"] for row in job.metrics]
    assert steps == list(range(1, len(steps) + 1)) and steps
    assert all("timing/sync_weights" in row for row in job.metrics)
    assert f"{len(steps)} step" in job.output and (job.run_dir / "report.png").stat().st_size > 1000


def assert_interrupted(job: Job) -> None:
    """The run ended by a signal, quietly, and left nothing behind."""
    assert "Traceback" not in job.output and "error:" not in job.output, job.output
    assert json.loads((job.run_dir / "run.json").read_text())["status"] == "interrupted"
    assert not (left := job.left_behind()), left


def actor_of(log: Path) -> psutil.Process:
    """The Ray actor that writes this log file; the processes that it starts, and those of a killed one, do so too."""
    writers = [process for process in psutil.process_iter() if _output(process) == str(log)]
    (actor,) = [process for process in writers if "".join(_command(process)[1:2]).startswith("ray::")]
    return actor


def _output(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _command(process: psutil.Process) -> list[str]:
    try:
        return [process.name(), *process.cmdline()]
    except psutil.Error:
        return []
