"""Results of the benchmarks as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path | None, result: Any) -> None:
    """Write the result to the file of --json, where there is one; creates its folder."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, default=str, indent=1) + "\n")
