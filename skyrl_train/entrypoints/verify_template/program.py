"""Check that conversations of several turns have the tokens that a server would make of their messages.

    python -m skyrl_train.entrypoints.verify_template trainer.policy.model.path=PATH [key=value ...]

Plays conversations with the model's chat template and generator.chat_template_kwargs: plain ones, and some with system
messages, thoughts, white space, tools. The table shows for each form of a conversation (docs/environments.md) whether
its requests are the template's own rendering. No Ray and no GPU; of a local model, no weights are read.
Exit code: 0 the form of the configuration is exact, 1 it is not, 2 the template cannot be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_train.checks.tokenizer import load_tokenizer
from skyrl_train.checks.training import MODEL
from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.rl import RL
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.exactness import Finding, Outcome
from skyrl_train.entrypoints.command import guarded, prints_help
from skyrl_train.entrypoints.verify_template.before_run import STEP_WISE, appends, findings
from skyrl_train.hf.download import download
from skyrl_train.hf.hub import local_folder

COLORS = {Outcome.EXACT: "green", Outcome.RETOKENISED: "green", Outcome.REJECTED: "yellow", Outcome.WRONG: "red"}
MEANING = {
    Outcome.RETOKENISED: "same text: only the tokenizer's choice of tokens differs; the sampled ones are kept",
    Outcome.UNCLOSED: "unclosed: the template does not end turns, so a sampled end-of-sequence token stays",
    Outcome.REWRITTEN: "rewritten: the template shows earlier turns differently than they were sampled",
    Outcome.WRONG: "wrong: turns are joined with other tokens than the template's",
    Outcome.REJECTED: "rejected: the template raises an error for such messages",
}


def main(argv: Sequence[str]) -> int:
    """Check the template of a command line and return the exit code."""
    console = Console()
    if prints_help(argv, __doc__, console):
        return 0
    program = replace(RL, module="skyrl_train.entrypoints.verify_template")
    return guarded(lambda: verify(program.read(argv), console), Console(stderr=True), (ValueError, OSError))


def verify(config: Config, console: Console) -> int:
    """Print the table of the configured model. Raises: ValueError without a chat template or tokenizer."""
    trainer = config.trainer
    download(MODEL, trainer.policy.model.path, trainer.download_timeout_s)
    folder = local_folder(trainer.policy.model.path)
    tokenizer = load_tokenizer(folder, MODEL, trainer.trust_remote_code)
    chat = ChatTemplate(tokenizer, config.generator.chat_template_kwargs)
    found = list(findings(chat, folder))
    console.print(table(found))
    for each in found:
        if each.detail:
            console.print(f"  {escape(each.feature.name)}: {escape(each.detail)}", highlight=False, soft_wrap=True)
    for outcome in dict.fromkeys(each.outcome for each in found if each.outcome in MEANING):
        console.print(MEANING[outcome], style="dim", highlight=False, soft_wrap=True)
    worst = broken(config.generator, found)
    form = form_of(config.generator)
    if not worst:
        console.print(f"[bold green]exact[/] for the form of this configuration: {form}", highlight=False)
        return 0
    hint = "" if config.generator.step_wise_trajectories else f". Set {STEP_WISE} to render each turn as a server does"
    console.print(
        f"[bold red]not exact[/] for the form of this configuration, {form}: {', '.join(worst)}{hint}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 1


def form_of(generator: GeneratorConfig) -> str:
    """Name of the column of the table."""
    if appends(generator):
        return "append"
    return "step-wise" if generator.step_wise_trajectories else "one message"


def broken(generator: GeneratorConfig, found: Sequence[Finding]) -> list[str]:
    """Features that are not exact in the configured form; those that a template rejects are not counted, but the first:
    a conversation of plain text.
    """
    inexact = (Outcome.REWRITTEN, Outcome.WRONG, Outcome.UNCLOSED)
    names = [each.feature.name for each in found if appends(generator) and each.outcome in inexact]
    return names or [found[0].feature.name] * (_cells(found[0])[form_of(generator)] is Outcome.REJECTED)


def _cells(finding: Finding) -> dict[str, Outcome]:
    return {
        "append": finding.outcome,
        "step-wise": Outcome.EXACT if finding.is_rendered else Outcome.REJECTED,
        "one message": Outcome.EXACT if finding.is_prompt_rendered else Outcome.REJECTED,
    }


def table(found: Sequence[Finding]) -> Table:
    """One row for each feature, one column for each form."""
    result = Table("conversations with", *_cells(found[0]))
    for each in found:
        cells = (f"[{COLORS.get(cell, 'magenta')}]{cell.value}[/]" for cell in _cells(each).values())
        result.add_row(each.feature.name, *cells)
    return result
