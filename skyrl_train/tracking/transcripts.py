"""Readable samples of a step: in samples.jsonl, and a few on the console."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from skyrl_train.tracking.format import number
from skyrl_train.tracking.jsonl import JsonLinesWriter

if TYPE_CHECKING:
    from skyrl_train.types import Prompt, Sample

log = logging.getLogger(__name__)

REFERENCES = ("ground_truth", "reference", "answer", "solution")
"""Columns of reference answers."""
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
    uid: str = ""
    """Uid of the prompt; the samples of a group share it."""
    conversation: int = 0
    """Index of the conversation in its group. Samples that are turns of one conversation share it."""
    data_source: str = ""
    env_class: str = ""
    reference: Any = None
    """Reference answer of the row; None if it has none."""
    turns: int = 0
    num_tokens: int = 0
    """Tokens that the policy wrote."""
    policy_version: int = 0
    env_metrics: Mapping[str, Any] = field(default_factory=dict)
    named_rewards: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    """All tokens of the sample as text, including special tokens."""


def transcript_of(
    step: int, sample: Sample, prompt: Prompt | None = None, text: str = "", conversation_index: int = 0
) -> Transcript:
    """A sample as text; its prompt is everything before the policy's first turn.

    Args: prompt: its row; text: of its tokens; conversation_index: of its conversation in the group.
    """
    messages = sample.transcript
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"][-sample.turns :]
    first = spoken[0] if sample.turns and spoken else len(messages)
    return Transcript(
        step=step,
        prompt=conversation(messages[:first]),
        response=conversation(messages[first:]),
        reward=sample.reward,
        stop_reason=sample.stop_reason,
        uid="" if prompt is None else prompt.uid,
        conversation=conversation_index,
        data_source="" if prompt is None else prompt.data_source,
        env_class="" if prompt is None else prompt.env_class,
        reference=None if prompt is None else reference_of(prompt.extras),
        turns=sample.turns,
        num_tokens=sample.num_written,
        policy_version=sample.policy_version,
        env_metrics=sample.env_metrics,
        named_rewards=sample.named_rewards,
        text=text,
    )


def reference_of(row: Mapping[str, Any]) -> Any:
    """The reference answer in a row: `reward_spec.ground_truth`, or a column that is named like one."""
    spec = row.get("reward_spec")
    if isinstance(spec, Mapping) and "ground_truth" in spec:
        return spec["ground_truth"]
    return next((row[name] for name in REFERENCES if name in row), None)


class TranscriptLog:
    """Appends transcripts to a file and shows the first of `num_shown` prompts of each call on the console."""

    def __init__(self, path: Path, console: Console | None = None, num_shown: int = 2) -> None:
        self._writer = JsonLinesWriter(path)
        self._console = console or Console()
        self._num_shown = num_shown
        self._warned = False

    def log(self, transcripts: Sequence[Transcript]) -> None:
        """Write transcripts; a full disk is logged once, and the missing lines are written when there is room."""
        first_of: dict[str | int, Transcript] = {}
        for index, transcript in enumerate(transcripts):
            first_of.setdefault(transcript.uid or index, transcript)
        for transcript in list(first_of.values())[: self._num_shown]:
            self._console.print(transcript_panel(transcript))
        for transcript in transcripts:
            try:
                self._writer.write(row_of(transcript))
            except OSError as error:
                if not self._warned:
                    log.warning("sample transcripts cannot be written, training continues without them: %s", error)
                self._warned = True

    def close(self) -> None:
        self._writer.close()


def row_of(transcript: Transcript) -> dict[str, Any]:
    """Its fields. Unlike `asdict` this copies no values of environments, which some do not allow."""
    return {each.name: getattr(transcript, each.name) for each in fields(transcript)}


def transcript_panel(transcript: Transcript) -> Panel:
    """A framed transcript; its text is not interpreted as markup."""
    body = Text()
    body.append(shortened(transcript.prompt), style="dim")
    body.append("\n")
    body.append(shortened(transcript.response), style="green" if transcript.reward > 0 else "red")
    title = f"sample of step {transcript.step} · reward {number(transcript.reward)} · {transcript.stop_reason}"
    return Panel(body, title=Text(title), title_align="left", border_style="dim")


def conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Chat messages as one text: a single one is its content, several are `role: content` each."""
    if len(messages) == 1:
        return _text(messages[0])
    return "\n".join(f"{message['role']}: {_text(message)}" for message in messages)


def _text(message: Mapping[str, Any]) -> str:
    """Content of a message, and its tool calls as JSON; also content that is in parts."""
    content, calls = message.get("content") or "", message.get("tool_calls")
    if isinstance(calls, list | tuple):
        calls = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls]
    parts = [part for part in (content, calls) if part]
    return "\n".join(
        part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str) for part in parts
    )


def shortened(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The text, or its beginning and end if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
