"""Dockerfiles as instructions, for check_docker.py and run_docker.py."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

NAMES = frozenset(
    ("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL")
    + ("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR")
)


@dataclass(frozen=True)
class Instruction:
    line: int  # where it begins, from 1
    name: str  # in capitals
    value: str  # continuation lines joined, comments between them left out, flags taken off
    flags: Mapping[str, str]  # --chown=a:b -> {"chown": "a:b"}

    @property
    def exec_form(self) -> list[str] | None:
        """The words of `["a", "b"]`; None where the value is no such list."""
        try:
            words = json.loads(self.value)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None

    @property
    def commands(self) -> list[list[str]]:
        """The shell's simple commands in order, each as words; assignments before a command are left out.

        `if`, `then` and the like are dropped, so what a condition guards is a command like any other.
        """
        lexer = shlex.shlex(self.value, posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        commands: list[list[str]] = [[]]
        for word in lexer:
            if re.fullmatch(r"[;&|()]+", word):
                commands.append([])
            elif commands[-1] or not re.fullmatch(r"if|then|else|fi|do|done|!|\w+=.*", word):
                commands[-1].append(word)
        return [command for command in commands if command]

    @property
    def has_pipe(self) -> bool:
        """Whether one command's output is another's input; `||` is none."""
        lexer = shlex.shlex(self.value, posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        return any(word in ("|", "|&") for word in lexer)

    @property
    def assignments(self) -> dict[str, str | None]:
        """Of ENV and ARG: name -> value, None for an ARG without one."""
        words = shlex.split(self.value)
        if self.name == "ENV" and words and "=" not in words[0]:
            return {words[0]: " ".join(words[1:])}
        pairs = (word.partition("=") for word in words)
        return {name: value if separator else None for name, separator, value in pairs}


def parse(text: str) -> list[Instruction]:
    """Raises ValueError for a line that begins with no instruction, and for what is not read here: heredocs."""
    instructions: list[Instruction] = []
    start, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if joined else number
        joined += line.rstrip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            joined += " "
            continue
        instructions.append(_instruction(start, joined.strip()))
        joined = ""
    if joined:
        raise ValueError(f"line {start}: ends in the middle of an instruction")
    return instructions


def _instruction(line: int, text: str) -> Instruction:
    name, _, value = text.partition(" ")
    if name.upper() not in NAMES:
        raise ValueError(f"line {line}: {name!r} is no instruction")
    if re.search(r"<<-?\s*[\"']?\w", value):
        raise ValueError(f"line {line}: heredocs are not read here; write the commands with &&")
    flags: dict[str, str] = {}
    value = value.strip()
    while match := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", value):
        flags[match[1]] = match[2] or ""
        value = value[match.end() :]
    return Instruction(line, name.upper(), value, flags)


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}` and `${NAME:-default}`, as the builder puts them into all but RUN, CMD and ENTRYPOINT."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2]) or match[3] or ""

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, text)
