"""GSM8K as rows for the environment `gsm8k`: grade-school problems whose answers end with `#### NUMBER`.

`data.train_data=["openai/gsm8k:main:train"] data.row_fn=skyrl_train.tasks.gsm8k:gsm8k_row` reads it from the hub.

python -m skyrl_train.tasks.gsm8k --output_dir ~/data/gsm8k     write train.parquet and validation.parquet
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
FILES = {"train": "train.parquet", "test": "validation.parquet"}
"""Split -> file, as skyrl_train 0.4 named it."""
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")

Row = dict[str, Any]


def gsm8k_row(row: Row) -> Row:
    """A row of `openai/gsm8k` as skyrl_train 0.4 wrote it; `extra_info` lacks the split and the index.

    Raises: ValueError if the row is not one of that data set.
    """
    missing = {"question", "answer"} - row.keys()
    if missing:
        raise ValueError(f"a row of {NAME} has the columns question and answer, this one has no {min(missing)}")
    solution = _ANSWER.search(row["answer"])
    if solution is None:
        raise ValueError(f"the answer has no line `#### NUMBER`: {row['answer'][-80:]!r}")
    return {
        "data_source": NAME,
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": solution[1].replace(",", "")},
        "extra_info": {"answer": row["answer"], "question": row["question"]},
    }


def write(output_dir: Path, source: str = NAME) -> dict[Path, int]:
    """Write both files of the data set. Returns: file -> number of rows. Args: source: hub name or a local copy."""
    import datasets

    output_dir.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, file in FILES.items():
        rows = []
        for index, given in enumerate(datasets.load_dataset(source, "main", split=split).to_list()):
            row = gsm8k_row(given)
            rows.append({**row, "extra_info": {"split": split, "index": index, **row["extra_info"]}})
        datasets.Dataset.from_list(rows).to_parquet(output_dir / file)
        written[output_dir / file] = len(rows)
    return written


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write GSM8K as the parquet files that skyrl_train 0.4 wrote.")
    parser.add_argument("--output_dir", type=Path, default=Path("~/data/gsm8k"))
    parser.add_argument("--source", default=NAME, help="name on the hub, or folder of a local copy")
    chosen = parser.parse_args(argv)
    try:
        written = write(chosen.output_dir.expanduser(), chosen.source)
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {chosen.source} cannot be read, or its rows written: {error}\n")
    for file, num_rows in written.items():
        print(f"{file}: {num_rows} rows")


if __name__ == "__main__":
    main()
