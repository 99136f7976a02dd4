"""The error of a configuration."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Problems of a configuration, as sentences for the user; `str(error)` is the complete message."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"{len(self.problems)} problems in the configuration:"]
        return "\n".join(lines + [f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1)])
