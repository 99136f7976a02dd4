"""Print each NAME@VERSION that an engine's HTTP endpoint serves, when it appears, until the endpoint is gone.

    python scripts/watch_versions.py http://127.0.0.1:8000/v1

May be started before the run; asks every tenth of a second, so a version that is served for less may be missed.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

PERIOD_S = 0.1
PATIENCE_S = 5.0
"""Without an answer after the first one, for this long, the endpoint is gone; a busy one may miss a call."""


def served_versions(url: str) -> list[str]:
    """Names with a version that `GET /models` lists. Raises: OSError without an answer."""
    with urllib.request.urlopen(f"{url}/models", timeout=PATIENCE_S) as answer:
        return [model["id"] for model in json.load(answer)["data"] if "@" in model["id"]]


def watch(url: str) -> None:
    last, answered = "", None
    while answered is None or time.monotonic() - answered < PATIENCE_S:
        try:
            names = served_versions(url)
            answered = time.monotonic()
        except OSError:
            names = []
        for name in names:
            if name != last:
                print(name, flush=True)
                last = name
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    watch(sys.argv[1].rstrip("/"))
