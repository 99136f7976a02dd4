"""Why an engine's core did not start, from the output of vLLM's processes; vLLM's own error only refers to it."""

from __future__ import annotations

import re

WRITTEN = re.compile(r"^\((?P<process>\w+ pid=\d+)\) (?:ERROR \S+ \S+ \[[^\]]*\] )?(?P<text>.*)$")
"""A line of a vLLM process: (EngineCore pid=7) ERROR 11-22 09:52:13 [core.py:1330] text"""
FRAME = re.compile(r'^  File "(?:.*/)?(?P<file>[^"]+)", line (?P<line>\d+)')


def root_cause(log: str) -> str | None:
    """Exception of the process that raised first, with file and line if it has no message; None if none raised."""
    first, cause = None, None
    in_stack, location, code = False, "", ""
    for line in log.splitlines():
        written = WRITTEN.match(line)
        if written is None or first not in (None, written["process"]):
            continue
        text = written["text"]
        if text.startswith("Traceback (most recent call last):"):
            first, in_stack = written["process"], True
        elif in_stack and (frame := FRAME.match(text)):
            location, code = f"{frame['file']}:{frame['line']}", ""
        elif in_stack and text.startswith(" "):
            code = code or text.strip()
        elif in_stack and text:
            in_stack, cause = False, text if ":" in text else f"{text} ({location}: {code})"
    return cause
