"""Readable samples of a step: in samples.jsonl, and a few on the console."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from skyrl_train.tracking.format import number
from skyrl_train.tracking.jsonl import JsonLinesWriter

if TYPE_CHECKING:
    from skyrl_train.types import Sample

log = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 600
"""Characters of each prompt and response on the console; the file has the complete text."""


@dataclass(frozen=True, slots=True)
class Transcript:
    step: int
    prompt: str
    response: str
    """All turns: the policy's text and the environment's replies."""
    reward: float
    stop_reason: str


def transcript_of(step: int, sample: Sample) -> Transcript:
    """A sample as text; the prompt is everything before the policy's first turn."""
    messages = sample.transcript
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"][-sample.turns :]
    first = spoken[0] if sample.turns and spoken else len(messages)
    return Transcript(
        step, conversation(messages[:first]), conversation(messages[first:]), sample.reward, sample.stop_reason
    )


class TranscriptLog:
    """Appends transcripts to a file and shows the first `num_shown` of each call on the console."""

    def __init__(self, path: Path, console: Console | None = None, num_shown: int = 2) -> None:
        self._writer = JsonLinesWriter(path)
        self._console = console or Console()
        self._num_shown = num_shown
        self._warned = False

    def log(self, transcripts: Sequence[Transcript]) -> None:
        """Write transcripts; a full disk is logged once, and the missing lines are written when there is room."""
        for transcript in transcripts[: self._num_shown]:
            self._console.print(transcript_panel(transcript))
        for transcript in transcripts:
            try:
                self._writer.write(asdict(transcript))
            except OSError as error:
                if not self._warned:
                    log.warning("sample transcripts cannot be written, training continues without them: %s", error)
                self._warned = True

    def close(self) -> None:
        self._writer.close()


def transcript_panel(transcript: Transcript) -> Panel:
    """A framed transcript; its text is not interpreted as markup."""
    body = Text()
    body.append(shortened(transcript.prompt), style="dim")
    body.append("\n")
    body.append(shortened(transcript.response), style="green" if transcript.reward > 0 else "red")
    title = f"sample of step {transcript.step} · reward {number(transcript.reward)} · {transcript.stop_reason}"
    return Panel(body, title=Text(title), title_align="left", border_style="dim")


def conversation(messages: Sequence[Mapping[str, str]]) -> str:
    """Chat messages as one text: a single one is its content, several are `role: content` each."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def shortened(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The text, or its beginning and end if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
