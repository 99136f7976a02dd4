"""The check of a model's configuration before a run: what becomes of released models, and how long it takes.

    python scripts/model_checks.py             # a row per model of tests/data/released_configs.json
    python scripts/model_checks.py --seconds   # a row per family: cold and cached, as a run pays them

Neither needs weights. Prints Markdown for docs/readings/models.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from skyrl_train.checks.equivalence import compare_with_hugging_face, config_and_problems, known_config
from skyrl_train.hf.ledger import LEDGERS
from skyrl_train.hf.shrink import shrunk

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "tests" / "data" / "released_configs.json").read_text()
)


def models() -> None:
    """A row per model: accepted with its differences from Hugging Face, or refused with the reason."""
    from skyrl_train.megatron.verify.model_check import Verdict, check_model

    verdicts: dict[str, Verdict] = {}
    print("| model | family | gradient | worst tensor | logprobs |\n|---|---|---|---|---|")
    for name, values in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(values))
            try:
                config, problems = config_and_problems(folder, "model")
            except ValueError as error:
                problems = [str(error).partition(": ")[2]]
        if problems:
            print(f"| {name} | {values['model_type']} | refused: {'; '.join(problems)} | | |", flush=True)
            continue
        key = json.dumps(shrunk(config).to_dict(), sort_keys=True, default=str)
        if key not in verdicts:
            verdicts[key] = check_model(config)
        verdict = verdicts[key]
        numbers = f"{verdict.gradient:.1e} | {verdict.worst[1]:.1e} | {verdict.logprobs:.1e}"
        print(f"| {name} | {config.model_type} | {numbers} |{' DIFFERS' if verdict.problems else ''}", flush=True)
    print(f"\n{len(CONFIGS)} models, {len(verdicts)} different small configurations")


def seconds() -> None:
    """A row per family: seconds of the first check of a configuration and of a later one."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        print("| family | first | later |\n|---|---|---|")
        for family in sorted(LEDGERS):
            values = next(values for values in CONFIGS.values() if _is_accepted(values, family))
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(values))
                times = []
                for _ in range(2):
                    started = time.monotonic()
                    compare_with_hugging_face(known_config(folder, "model"), folder, "model")
                    times.append(time.monotonic() - started)
            print(f"| {family} | {times[0]:.1f} s | {times[1]:.3f} s |", flush=True)


def _is_accepted(values: dict[str, Any], family: str) -> bool:
    if values["model_type"] != family:
        return False
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values))
        return not config_and_problems(folder, "model")[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", action="store_true")
    torch.set_num_threads(1)
    logging.disable()
    transformers_logging.disable_progress_bar()
    seconds() if parser.parse_args().seconds else models()


if __name__ == "__main__":
    main()
