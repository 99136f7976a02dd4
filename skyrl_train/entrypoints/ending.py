"""Last lines of a run on the console: its error or report, where its model is, and the command that resumes it."""

from __future__ import annotations

import contextlib
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from skyrl_train.config.redaction import BY_NAME, Secrets, secrets_of
from skyrl_train.hf.checkpoint import export_sum
from skyrl_train.tracking.run_dir import RunDir
from skyrl_train.trainer.run_state import load_checkpoint

EXPORT = "python -m skyrl_train.entrypoints.export_hf"
RESUMING = ("trainer.resume_mode", "trainer.resume_path")


def print_report(run_dir: RunDir, status: str, console: Console) -> None:
    """Write the report, and print a summary and its files."""
    if not run_dir.has_metrics:
        if status == "finished":  # else the reason has been said
            console.print("report  none: it is made from metrics.jsonl (jsonl in trainer.logger)", soft_wrap=True)
        return
    from skyrl_train.tracking.report.history import load_history, summarize
    from skyrl_train.tracking.report.report import write_report

    try:
        html, png = write_report(run_dir.path)
        summary = summarize(run_dir.path, load_history(run_dir.metrics)).line()
    except Exception as error:  # the run has ended: its exit code and the command that resumes it do not depend on this
        reason = str(error) if isinstance(error, ValueError | OSError) else f"{error!r}, a fault of the report"
        console.print(f"no report: {reason}", highlight=False, soft_wrap=True, markup=False)
        return
    console.print(f"{summary}\nreport  {html}\n        {png}", highlight=False, soft_wrap=True)


def last_lines(status: str, model: Path | None, checkpoint: Path | None, resume: str, export_path: str) -> list[str]:
    """Label and value of each line. Args: status: as in run.json; model: newest export; resume: command."""
    lines = [] if model is None else [f"model   {model}"]
    if status != "finished":
        lines.append(f"ckpt    {checkpoint or 'none: the run cannot be resumed'}")
        lines += [] if checkpoint is None else [f"resume  {resume}"]
    if model is None and checkpoint is not None:
        target = Path(export_path).expanduser().resolve() / checkpoint.name
        if _is_exported(checkpoint, target):
            return [*lines, f"model   {target}"]
        if target.exists():  # an export of the step before the run was resumed from an earlier one
            target = target.with_name(f"{target.name}_resumed")
        arguments = shlex.join([f"checkpoint={checkpoint}", f"export_path={target}"])
        lines.append(f"model   not exported. To export it: {EXPORT} {arguments}")
    elif model is None and status == "finished":
        lines.append("model   neither an export nor a checkpoint was written (trainer.hf_save_interval, ckpt_interval)")
    return lines


def _is_exported(checkpoint: Path, target: Path) -> bool:
    """Whether a folder has the export of a checkpoint; False for a damaged one, whose error would hide the run's."""
    written = export_sum(target)
    with contextlib.suppress(ValueError):
        return written is not None and written == load_checkpoint(checkpoint).state.export
    return False


def resume_command(module: str, argv: Sequence[str] | None, secrets: Secrets, *, has_path: bool) -> str:
    """Command line that resumes the run of these arguments. Args: argv: None for a run from a script; has_path: whether
    its configuration sets trainer.resume_path, perhaps in a file.
    """
    own = ["trainer.resume_mode=latest", *(["trainer.resume_path=null"] if has_path else [])]
    if argv is None:
        return f"run it again with {' '.join(own)}"
    kept = [secrets.argument(text) for text in argv if text.lstrip("+").partition("=")[0] not in RESUMING]
    return shlex.join(["python", "-m", module, *kept, *own])


def report_failure(
    error: Exception, run_dir: RunDir | None, console: Console, secrets: Secrets = BY_NAME, moved_from: str = ""
) -> None:
    """Print the error; the traceback goes into the run's folder, if there is one. Args: moved_from: the folder in which
    the error's log files were before it gave way to an earlier run."""
    message, where = str(error), ""
    if run_dir is not None and moved_from:
        message = message.replace(f"{Path(moved_from).expanduser().resolve()}/", f"{run_dir.path}/")
    if run_dir is not None:
        path, stack = run_dir.logs / "driver.log", secrets.text("".join(traceback.format_exception(error)))
        try:
            with path.open("a") as file:
                file.write(stack)
            where = f"\nFull traceback: {path}"
        except OSError as full:
            where = f"\n{path} could not be written ({full}). Full traceback:\n{stack}"
    kind = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: "
    print_error(f"{kind}{message}{where}", console, secrets)


def print_error(message: str, console: Console, secrets: Secrets | None = None) -> None:
    """Print a message with its secrets masked. Args: secrets: by default those of the environment."""
    shown = (secrets or secrets_of({})).text(message)
    console.print(f"[bold red]error:[/] {escape(shown)}", highlight=False, soft_wrap=True)
