"""A program from its arguments to its exit code: one error message per failure, a clean end on a signal.

Exit codes: 0 finished, 1 the run failed, 2 invalid configuration, 130 ended by SIGINT, 143 by SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from rich.console import Console

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.program import Program, secrets_in
from skyrl_train.config.redaction import Secrets, hidden_in_logs
from skyrl_train.config.training import RunConfig
from skyrl_train.entrypoints.ending import last_lines, print_error, print_report, report_failure, resume_command
from skyrl_train.faults import where
from skyrl_train.imports import imported, quick_imports, require_working_torchvision
from skyrl_train.tracking import loop_watch
from skyrl_train.tracking.console import lossy_stdout
from skyrl_train.tracking.run_dir import RunDir, is_unfinished, run_dir_for

if TYPE_CHECKING:
    from skyrl_train.entrypoints.run import Run

log = logging.getLogger(__name__)
T = TypeVar("T", bound=RunConfig)
W = TypeVar("W")
WAIT_S = 0.5
"""Seconds between checks for Ctrl-C: a signal that another thread receives does not wake this one."""


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """The parts in which the programs that train differ."""

    program: Program[T]
    check: Callable[[T, int | None, bool], None]
    """check(config, rows left in the training data or None, whether to check files) raises ConfigError."""
    run: str | type[Run]
    """Its Run; `module:Class` is imported after the configuration is checked, because that takes seconds."""
    has_report: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    error: Exception | None = None


class Interrupts:
    """Passes Ctrl-C to a run in another thread than the main one."""

    def __init__(self) -> None:
        self._send: Callable[[], object] | None = None
        self._num_pending = 0

    def request(self) -> None:
        """Like SIGINT; kept until the run is connected."""
        if self._send is None:
            self._num_pending += 1
        else:
            with contextlib.suppress(RuntimeError):  # the run's event loop has closed: it has ended
                self._send()

    def connect(self, send: Callable[[], object]) -> None:
        """Send requests from now on, first the pending ones."""
        self._send = send
        for _ in range(self._num_pending):
            send()


def execute(command: Command[T], argv: Sequence[str]) -> int:
    """Run a command line and return the exit code. Every failure is one message. Works beside a running event loop."""
    console, interrupts = Console(), Interrupts()

    def work() -> int:
        config = command.program.read(argv)
        try:
            prepare(command, config)
            command.check(config, None, True)
        except ConfigError as error:
            raise command.program.naming_old_keys(error, argv) from error
        return run(command, config, console, interrupts, argv).code

    return guarded(lambda: beside_a_running_loop(work, interrupts), console)


def beside_a_running_loop(work: Callable[[], W], interrupts: Interrupts) -> W:
    """The result of `work`, in a separate thread if this one already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="skyrl-train") as thread:
        future = thread.submit(work)
        while not future.done():
            try:
                wait([future], timeout=WAIT_S)
            except KeyboardInterrupt:
                interrupts.request()
        return future.result()


def guarded(work: Callable[[], int], console: Console, errors: tuple[type[Exception], ...] = (ConfigError,)) -> int:
    """The exit code of `work`, or that of a signal or of one of the errors, which is printed."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("skyrl_train").setLevel(logging.INFO)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        return work()
    except errors as error:
        print_error(str(error), console)
        return 2
    except KeyboardInterrupt as interrupt:
        console.print("interrupted", style="yellow")
        return _exit_code(interrupt)


def _terminate(number: int, frame: object) -> NoReturn:
    raise loop_watch.Terminated


def _exit_code(interrupt: KeyboardInterrupt) -> int:
    return 128 + (signal.SIGTERM if isinstance(interrupt, loop_watch.Terminated) else signal.SIGINT)


def prepare(command: Command[T], config: T) -> None:
    """Call the experiment's `trainer.prepare` (`module:function`), which creates missing files."""
    with _config_errors():
        require_working_torchvision()
    if config.trainer.prepare is None:
        return
    command.check(config, None, False)
    with _config_errors():
        target = imported("trainer.prepare", config.trainer.prepare)
    with _no_exit():
        target(config)


def run(
    command: Command[T],
    config: T,
    console: Console,
    interrupts: Interrupts | None = None,
    argv: Sequence[str] | None = None,
) -> Ended:
    """Train with a checked configuration; a failure is printed. Args: argv: of the command line, if there was one."""
    secrets = secrets_in(config)
    with hidden_in_logs(secrets), lossy_stdout():
        has_path = config.trainer.resume_path is not None
        resume = resume_command(command.program.module, argv, secrets, has_path=has_path)
        return _run(command, config, console, secrets, interrupts or Interrupts(), resume)


def _run(
    command: Command[T], config: T, console: Console, secrets: Secrets, interrupts: Interrupts, resume: str
) -> Ended:
    run_dir: RunDir | None = None
    training: Run | None = None
    status, code = "failed", 1
    failure: Exception | None = None
    try:
        with quick_imports():
            kind = resolve_name(command.run) if isinstance(command.run, str) else command.run
        with _config_errors(), _no_exit():
            training = kind(config, console)
        command.check(config, training.num_train_rows, True)
        with _config_errors():
            resumes = training.find_checkpoint()
        if training.is_done:
            console.print("all steps are done. For more, raise trainer.epochs or trainer.max_training_steps")
            if not (resumes and is_unfinished(config)):
                return Ended(0)
        with _config_errors():
            run_dir = run_dir_for(config, command.program.base_yaml(), resumes=resumes)
        ended_by = loop_watch.run(_until_signal(training, run_dir, console, secrets, interrupts))
        status, code = ("finished", 0) if ended_by is None else ("interrupted", 128 + ended_by)
    except ConfigError as error:
        print_error(str(error), console, secrets)
        code, failure = 2, error
    except KeyboardInterrupt as interrupt:
        status, code = "interrupted", _exit_code(interrupt)
    except Exception as error:
        if run_dir is not None and _has_not_begun(run_dir, training):
            run_dir = run_dir.give_way()
        report_failure(error, run_dir, console, secrets, moved_from=config.trainer.run_dir)
        failure = error
    finally:
        if run_dir is not None:
            if status == "interrupted" and _has_not_begun(run_dir, training):
                run_dir = run_dir.give_way()
            run_dir.finish(status)
            if command.has_report:
                print_report(run_dir, status, console)
            if training is not None and training.loop is not None:
                loop = training.loop
                lines = last_lines(status, loop.exported, loop.newest_checkpoint, resume, config.trainer.export_path)
                console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
        if (close := getattr(training, "close", None)) is not None:  # a class of the user's may be no Run
            close()
    return Ended(code, failure)


def _has_not_begun(run_dir: RunDir, training: Run | None) -> bool:
    return not run_dir.has_metrics and (training is None or training.loop is None)


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError([str(error)]) from error


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Turn a user's `sys.exit()`, which would end the program without an error, into one."""
    try:
        yield
    except SystemExit as end:
        problem = f"sys.exit({end.code!r}) was called before the start{where(end, __file__)}. Raise an error instead"
        raise ConfigError([problem]) from end


async def _until_signal(
    training: Run, run_dir: RunDir, console: Console, secrets: Secrets, interrupts: Interrupts
) -> int | None:
    """Train; the first SIGINT or SIGTERM ends the run after the current step, the second immediately.

    Returns: the signal that ended the run, or None. A step that fails after the signal is not an error: a service
    manager ends all processes of a service at once.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1 and training.request_stop():
            console.print("stopping after this step (press Ctrl-C again to stop now)", style="yellow")
        elif task is not None:
            task.cancel()

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main:
        interrupts.connect(partial(loop.call_soon_threadsafe, on_signal, signal.SIGINT))
    try:
        with loop_watch.LoopWatch(training.config.trainer.timeout_s, on_signal if is_main else None):
            if not training.is_done:
                await training.run(run_dir)
    except asyncio.CancelledError:
        if not received:
            raise
    except SystemExit as end:
        if training.loop is not None:
            raise RuntimeError(f"a call of sys.exit({end.code!r}) ended the step") from end
        return signal.SIGTERM  # while Ray starts, whose own handler exits
    except Exception as error:
        if not received:
            raise
        text = f"the current step was aborted: {secrets.text(str(error))}"
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    return received[0] if received else None


def prints_help(argv: Sequence[str], text: str | None, console: Console) -> bool:
    """Print a help text, if the arguments ask for it or there are none; return whether they do."""
    if argv and not {"-h", "--help"}.intersection(argv):
        return False
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return True
