"""Samples of training and evaluation as text, for files and trackers."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.tracking.jsonl import json_line
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.transcripts import Transcript, TranscriptLog, row_of, transcript_of

if TYPE_CHECKING:
    from torch import Tensor

    from skyrl_train.types import Group

log = logging.getLogger(__name__)

EVALUATIONS = "evaluations"
"""Folder of the samples of evaluations in a run's folder."""


class SampleLog:
    """Writes samples of training into samples.jsonl, and those of each evaluation into a separate file."""

    def __init__(
        self, transcripts: TranscriptLog, evaluations: Path, decode: Callable[[Tensor], str], tracker: Tracker
    ) -> None:
        """Args: evaluations: folder of their files; decode: token ids to text, with special tokens."""
        self._transcripts, self._evaluations, self._decode, self._tracker = transcripts, evaluations, decode, tracker

    def training(self, step: int, groups: Sequence[Group], max_samples: int) -> None:
        """Write the samples of the first groups. Args: max_samples: -1 for all."""
        rows = self._rows(step, groups, max_samples)
        self._transcripts.log(rows)
        self._tracker.log_samples(step, "samples/train", [plain(row) for row in rows])

    def evaluation(
        self, step: int, groups: Sequence[Group], logged_at: int | None = None, *, parquet: bool = False
    ) -> list[Path]:
        """Write all samples; a file that cannot be written (full disk) is logged.

        Args: step: of the weights; logged_at: step of the trackers, which do not go back; by default the same.
        Returns: the files.
        """
        rows = [plain(row) for row in self._rows(step, groups)]
        self._tracker.log_samples(step if logged_at is None else logged_at, "samples/eval", rows)
        target = self._evaluations / f"global_step_{step}.jsonl"
        try:
            self._evaluations.mkdir(parents=True, exist_ok=True)
            files = [_replaced(target, lambda draft: draft.write_bytes(b"".join(map(json_line, rows))))]
            if parquet:
                files.append(_replaced(target.with_suffix(".parquet"), lambda draft: write_parquet(draft, rows)))
        except OSError as error:
            log.warning("the samples of the evaluation of step %d cannot be written: %s", step, error)
            return []
        return files

    def _rows(self, step: int, groups: Sequence[Group], max_samples: int = -1) -> list[Transcript]:
        samples = (
            (sample, group.prompt, self._decode(sample.token_ids), index)
            for group in groups
            for index, conversation in enumerate(group.conversations)
            for sample in conversation
        )
        chosen = itertools.islice(samples, None if max_samples < 0 else max_samples)
        return [transcript_of(step, *values) for values in chosen]


def plain(row: Transcript) -> dict[str, Any]:
    """The row with JSON values only; other values, such as objects from environments, become text."""
    values: dict[str, Any] = json.loads(json_line(row_of(row)))
    return values


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One column per field; what differs in form from row to row (reference, metrics, named rewards) is JSON text.
    Raises: OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ("reference", "env_metrics", "named_rewards")
    flat = [{name: json.dumps(row[name]) if name in texts else row[name] for name in row} for row in rows]
    pq.write_table(pa.Table.from_pylist(flat), path)


def _replaced(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file that appears when it is complete. Raises: OSError."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path
