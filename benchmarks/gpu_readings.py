"""The readings of docs/gpu_performance.md and the GPU tests, one after the other, for as long as one has the machine.

    python benchmarks/gpu_readings.py --out readings                       # all that this machine has the GPUs for
    python benchmarks/gpu_readings.py --out readings --seconds 540 pp2 dp2 whole trl
    python benchmarks/gpu_readings.py --list

Those that measure time or need several GPUs come first, each alone on the machine; then the others of one GPU, as many
at once as there are GPUs. Each writes OUT/NAME.log and, if it measures, OUT/NAME.json; OUT/summary.txt has one line for
each when it ends, and first those that need more GPUs than there are. Models with random weights are made once, before
the first that takes them (--models, by default in memory). What cannot end in time is not begun, and what runs when the
seconds end is stopped with all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

import psutil
from gpu_step import arguments as step_arguments
from gpu_step import make_model
from main_job import REPOSITORY, environment

STEP, PYTEST = "benchmarks/gpu_step.py", "-m pytest -q -p no:cacheprovider -rfEs --durations=10"
FOUR_B = "--update-only --steps 3 --shape qwen3-4b"
TO_END_S = 10.0
"""For what is stopped, before it is killed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One command."""

    gpus: int
    command: str
    """After `python`; `{models}` is the folder of the models."""
    limit_s: int
    """Three times what it takes, or so, once the models are made."""
    alone: bool = True
    """Whether what runs beside it on other GPUs would change what it finds."""

    @property
    def shape(self) -> str | None:
        """Of the model that it takes from the folder."""
        return self.command.split("{models}/")[1].split()[0] if "{models}/" in self.command else None


def _update(layers: str, more: str = "") -> str:
    return f"{STEP} {FOUR_B} --model {{models}}/qwen3-4b --impl {layers} {more}".strip()


def _learns(experiment: str, *overrides: str) -> str:
    return f"benchmarks/quickstart.py --experiment {experiment} --seeds 1 -- {' '.join(overrides)}"


RANKS, ENGINES = "trainer.placement.policy_num_gpus_per_node", "generator.num_inference_engines"
PIPELINE = "trainer.policy.megatron_config.pipeline_model_parallel_size"
TENSOR = "trainer.policy.megatron_config.tensor_model_parallel_size"
SHARED = "trainer.placement.colocate_all=true"
LAYOUTS = {
    "colocated": (1, (SHARED, f"{RANKS}=1", f"{PIPELINE}=1")),
    "1_and_1": (2, (f"{RANKS}=1", f"{PIPELINE}=1")),
    "colocated_tp2_pp2": (4, (SHARED, f"{RANKS}=4", f"{TENSOR}=2", f"{ENGINES}=4")),
    "2_and_2": (4, (f"{RANKS}=2", f"{ENGINES}=2")),
}
"""Name -> GPUs and overrides of the experiments that learn sums, which have a pipeline of two ranks."""
WHOLE = "--shape qwen3-0.6b --model {models}/qwen3-0.6b"
READINGS = {
    "pp2": Reading(2, _update("torch", "--gpus 2 --pp 2 --samples 128"), 180),
    "pp2_te": Reading(2, _update("transformer_engine", "--gpus 2 --pp 2 --samples 128"), 180),
    "dp2": Reading(2, _update("torch", "--gpus 2 --samples 128"), 180),
    "tp2": Reading(2, _update("torch", "--gpus 2 --tp 2"), 180),
    "cp2_32k": Reading(
        2,
        f"{STEP} --update-only --steps 1 --shape qwen3-4b --model {{models}}/qwen3-4b --impl torch --gpus 2 --cp 2 "
        "--recompute full --samples 4 --sample-tokens 32768 --max-tokens 32768",
        300,
    ),
    "sync": Reading(2, "benchmarks/weight_sync.py --shape qwen3-8b --model {models}/qwen3-8b", 300),
    "offload_8b": Reading(2, "benchmarks/offload.py --shape qwen3-8b --model {models}/qwen3-8b --gpus 2 --pp 2", 300),
    "dedicated": Reading(2, f"{STEP} {WHOLE} --max-tokens 32768 --steps 3", 400),
    "tests_2": Reading(2, f"{PYTEST} tests/gpu --gpus 2 -n 4", 1200),
    "tests_4": Reading(4, f"{PYTEST} tests/gpu --gpus 4 -n 2", 600),
    "tests_3": Reading(3, f"{PYTEST} tests/gpu --gpus 3", 300),  # weights of two stages to a stock server
    **{
        f"{experiment}_{name}": Reading(gpus, _learns(experiment, *overrides), 400)
        for experiment in ("quickstart", "long_addition")
        for name, (gpus, overrides) in LAYOUTS.items()
    },
    "torch": Reading(1, _update("torch", "--parts --trace {out}/torch_kernels.txt"), 200),
    "te": Reading(1, _update("transformer_engine"), 200),
    "whole": Reading(1, f"{STEP} {WHOLE} --colocate --max-tokens 32768 --steps 3", 400),
    "trl": Reading(1, "benchmarks/gpu_step_vs_trl.py --trl-only --model {models}/qwen3-0.6b", 450),
    "moe": Reading(1, f"{STEP} --update-only --steps 3 --shape qwen3-30b-a3b --layers 6 --impl torch", 300),
    "memory": Reading(
        1, "benchmarks/device_memory.py --shape qwen3-0.6b --model {models}/qwen3-0.6b", 150, alone=False
    ),
    "offload_small": Reading(1, f"benchmarks/offload.py {WHOLE}", 100),
    "logprobs": Reading(1, "benchmarks/logprob_memory.py", 60),
    "pages": Reading(1, "benchmarks/memory_pages.py", 100),
    "communicators": Reading(1, "benchmarks/communicator_memory.py", 60, alone=False),
    "communicators_2": Reading(2, "benchmarks/communicator_memory.py --gpus 2", 60),
    "few_channels_2": Reading(2, "benchmarks/communicator_memory.py --gpus 2 --max-ctas 8", 60),
    "memory_pp2": Reading(
        2, "benchmarks/device_memory.py --shape qwen3-0.6b --model {models}/qwen3-0.6b --gpus 2 --pp 2", 150
    ),
    "colocated_sync": Reading(
        1, "benchmarks/weight_sync.py --shape qwen3-4b --model {models}/qwen3-4b --colocate", 300
    ),
    "offload": Reading(1, "benchmarks/offload.py --shape qwen3-4b --model {models}/qwen3-4b", 300),
    "tests_1": Reading(1, f"{PYTEST} tests/gpu --gpus 1 -n 4", 900, alone=False),
}
"""Name -> reading, the most wanted first."""


class Readings:
    """Runs commands until a moment, and notes how each ended."""

    def __init__(self, out: Path, models: Path, until: float) -> None:
        self._out, self._models, self._until = out, models, until
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, readings: dict[str, Reading], devices: Sequence[int | None]) -> None:
        """Return when all have ended. A device takes one at a time, which sees no other; None: one that sees all."""
        waiting: Queue[tuple[str, Reading]] = Queue()
        for name, reading in readings.items():
            if self._has_model(name, reading):
                waiting.put((name, reading))

        def lane(device: int | None) -> None:
            with contextlib.suppress(Empty):
                while True:
                    self._run(*waiting.get_nowait(), device)

        # This thread only waits, so that Ctrl-C reaches it wherever the others are.
        with ThreadPoolExecutor(max(1, len(devices))) as threads:
            try:
                lanes = [threads.submit(lane, device) for device in devices]
                for one in lanes:
                    one.result()
            except BaseException:
                self._stop()
                raise

    def note(self, line: str) -> None:
        """Print the line and add it to the summary."""
        with self._lock, (self._out / "summary.txt").open("a") as summary:
            summary.write(line + "\n")
            print(line, flush=True)

    def _stop(self) -> None:
        """End what runs, and begin nothing more."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one would leave processes behind
        with self._lock:
            self._until = min(self._until, time.monotonic())
            running = list(self._running)
        for process in running:
            _end(process)

    def _has_model(self, name: str, reading: Reading) -> bool:
        """Make it if it is not there. True also where none is needed, or no time is left."""
        left_s = self._until - time.monotonic()
        if reading.shape is None or left_s <= 0:
            return True
        try:
            make_model(self._models / reading.shape, step_arguments(["--shape", reading.shape]), timeout_s=left_s)
        except RuntimeError as error:
            (self._out / f"{name}.log").write_text(f"{error}\n")
            self.note(f"{name}: not begun, its model could not be made: {str(error).splitlines()[-1]}")
            return False
        return True

    def _run(self, name: str, reading: Reading, device: int | None) -> None:
        with self._lock:  # so that _stop() sees all that was begun
            limit_s = min(reading.limit_s, self._until - time.monotonic())
            process = self._start(name, reading, device) if limit_s >= reading.limit_s / 3 else None
        if process is None:
            self.note(f"{name}: not begun, {max(0.0, limit_s):.0f} s were left")
            return
        started = time.monotonic()
        try:
            ended = f"exit code {process.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_s:.0f} s"
            _end(process)
        self._running.discard(process)
        self.note(f"{name}: {ended}, {time.monotonic() - started:.0f} s")

    def _start(self, name: str, reading: Reading, device: int | None) -> subprocess.Popen[bytes]:
        command = reading.command.format(models=self._models, out=self._out)
        if "pytest" not in command:
            options, dashes, overrides = command.partition(" -- ")
            command = f"{options} --json {self._out}/{name}.json{dashes}{overrides}"
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": name_of(device)}
        with (self._out / f"{name}.log").open("w") as log:
            log.write(f"$ python {command}\n")
            log.flush()
            process = subprocess.Popen(
                [sys.executable, *command.split()],
                cwd=REPOSITORY,
                env=environment([REPOSITORY / "benchmarks"]) | visible,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.add(process)
        return process


def name_of(device: int) -> str:
    """Of a device of this process, for one that shall see it alone."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(device) if named is None else named.split(",")[device]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="readings, in this order (default: all)")
    parser.add_argument("--out", type=Path, default=Path("readings"))
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/models"))
    parser.add_argument("--gpus", type=int, help="of this machine (default: all that torch sees)")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    args = parser.parse_args(given)
    if unknown := [name for name in args.names if name not in READINGS]:
        parser.error(f"there is no reading {', '.join(unknown)}; there are {', '.join(READINGS)}")
    return args


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started, in sessions of their own too (jobs of the tests), and their memory on the devices."""
    known: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        known = _with_children({psutil.Process(process.pid)})
    process.send_signal(signal.SIGINT)  # pytest ends its jobs
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=TO_END_S)
    known = _with_children(known)  # what was begun meanwhile
    for one in sorted(known, key=psutil.Process.create_time):  # parents first: none goes on when its child has ended
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session: also what has lost its parent
    process.wait()
    psutil.wait_procs(known, timeout=TO_END_S)


def _with_children(processes: set[psutil.Process]) -> set[psutil.Process]:
    """And theirs. psutil finds none of a process that is gone, nor takes another for it that got its number."""
    found = set(processes)
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(one.children(recursive=True))
    return found


def main() -> int:
    args = arguments()
    wanted = {name: READINGS[name] for name in args.names or READINGS}
    if args.list:
        for name, reading in wanted.items():
            print(f"{name:15} {reading.gpus} GPU(s)  python {reading.command}")
        return 0
    until = time.monotonic() + args.seconds
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    args.out.mkdir(parents=True, exist_ok=True)
    possible = {name: reading for name, reading in wanted.items() if reading.gpus <= args.gpus}
    readings = Readings(args.out.resolve(), args.models.resolve(), until)
    for name, reading in wanted.items():
        if name not in possible:
            readings.note(f"{name}: needs {reading.gpus} GPUs, {args.gpus} here")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what `timeout` sends
    try:
        for name, reading in possible.items():
            if reading.alone:
                readings.run({name: reading}, [0 if reading.gpus == 1 else None])
        readings.run({name: reading for name, reading in possible.items() if not reading.alone}, range(args.gpus))
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
