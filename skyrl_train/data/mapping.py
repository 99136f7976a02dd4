"""Rows of any data set -> rows with the columns that are read here, by `data.row_fn`, `data.columns` and templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import Any

from skyrl_train.config.training import DataConfig
from skyrl_train.data.location import Location
from skyrl_train.data.rows import columns
from skyrl_train.data.text import Filled, shortened
from skyrl_train.imports import imported

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowMapping:
    """The keys of `data` that say what a row means; without any, rows stay unchanged."""

    row_fn: Callable[[Row], Row | None] | None = None
    columns: Mapping[str, str | None] = field(default_factory=dict)
    prompt_template: str | None = None
    system_prompt: str | None = None

    @classmethod
    def of(cls, data: DataConfig) -> RowMapping:
        """Raises: ValueError if `data.row_fn` cannot be imported."""
        row_fn = None if data.row_fn is None else imported("data.row_fn", data.row_fn)
        return cls(
            row_fn=row_fn, columns=data.columns, prompt_template=data.prompt_template, system_prompt=data.system_prompt
        )

    @property
    def writes_messages(self) -> bool:
        """Whether a prompt of text becomes chat messages where it could also be tokenised unchanged."""
        return self.prompt_template is not None or self.system_prompt is not None

    def row(self, given: Row, where: Location) -> Row | None:
        """The row after `row_fn`, `columns` and the template; None if `row_fn` drops it.

        Raises: ValueError that begins with `where` (source and position).
        """
        made: Any = given if self.row_fn is None else self._by_function(dict(given), where)
        if made is None:
            return None
        row = {**made, **{name: _column(made, name, column, where) for name, column in self.columns.items() if column}}
        for name in [name for name, column in self.columns.items() if column is None]:
            row.pop(name, None)
        if self.columns.get("answer") is not None:
            truth = {"ground_truth": _truth(row["answer"], where)}
            spec = row.get("reward_spec") or {}
            if isinstance(spec, dict):  # the reader of prompts refuses others
                row["reward_spec"] = {"method": "rule", **spec, **truth}
        if self.prompt_template is not None:
            row["prompt"] = _filled(self.prompt_template, row, where)
        return row

    def messages(self, prompt: Any) -> Any:
        """Text as a user message; text and messages get the system prompt. Raises: like `with_system_prompt`."""
        return self.with_system_prompt([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def with_system_prompt(self, messages: Any) -> Any:
        """Raises: ValueError without the row's location if the messages already have a system prompt."""
        if self.system_prompt is None or not isinstance(messages, list):
            return messages
        if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
            raise ValueError("data.system_prompt is set and the row has a system message. Remove one of them")
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def check_some_left(self, num_left: int, num_rows: int, sources: Sequence[str]) -> None:
        """Raises: ValueError if the sources have no row, or `row_fn` has dropped every one."""
        if not num_rows:
            raise ValueError(f"data source {', '.join(sources)} has no rows. Give one with at least one row")
        if not num_left:
            raise ValueError(
                f"{self._function} returned None for each of the {num_rows} rows of {', '.join(sources)}. Return a row"
            )

    @property
    def _function(self) -> str:
        return f"data.row_fn {getattr(self.row_fn, '__name__', self.row_fn)}"

    def _by_function(self, given: Row, where: Location) -> Any:
        assert self.row_fn is not None
        try:
            row = self.row_fn(given)
        except Exception as error:  # a user's function may raise anything
            raise ValueError(
                f"{where}: {self._function} raised {type(error).__name__}: {error}. The columns are {columns(given)}"
            ) from error
        if row is not None and not isinstance(row, dict):
            raise ValueError(
                f"{where}: {self._function} returned {shortened(row)}: it must return a dict, or None to drop the row"
            )
        return row


def _truth(answer: Any, where: Location) -> Any:
    """The answer as environments compare it, with text. Raises: ValueError if it is not an answer."""
    if answer is None:
        raise ValueError(f"{where}: data.columns.answer: this row's answer is null. Drop the row with data.row_fn")
    if isinstance(answer, date):  # the json reader of `datasets` makes them of text
        raise ValueError(
            f"{where}: data.columns.answer: the answer was read as a date, {answer}. Store it as text, in a .jsonl or "
            ".parquet file"
        )
    if isinstance(answer, Decimal):  # with as many digits after the point as its column has
        answer = int(answer) if answer == int(answer) else f"{answer:f}".rstrip("0")
    if isinstance(answer, float) and answer.is_integer():  # a column with nulls or fractions
        answer = int(answer)
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    return str(answer) if is_number else answer


def _column(row: Row, name: str, column: str, where: Location) -> Any:
    """Value of a column; `a.b` is field b of column a."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"{where}: data.columns.{name} is {column}: the row has no such column. The columns are {columns(row)}"
            )
        value = value[part]
    return value


def _filled(template: str, row: Row, where: Location) -> str:
    try:
        return Filled().vformat(template, (), row)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where}: data.prompt_template is {shortened(template)}: it cannot be filled ({type(error).__name__}: "
            f"{error}). The columns are {columns(row)}; other braces are written twice, as in \\boxed{{{{}}}}"
        ) from error
