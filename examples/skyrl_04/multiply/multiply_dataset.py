"""Rows of products of two numbers: `python multiply_dataset.py FILE.jsonl`."""

import json
import random
import sys
from pathlib import Path

NUM_ROWS, LARGEST = 512, 99


def row(first: int, second: int) -> dict[str, object]:
    return {
        "data_source": "multiply",
        "prompt": [{"role": "user", "content": f"{first}*{second}="}],
        "env_class": "multiply",
        "reward_spec": {"method": "rule", "ground_truth": str(first * second)},
    }


if __name__ == "__main__":
    numbers = random.Random(0)
    rows = [row(numbers.randint(2, LARGEST), numbers.randint(2, LARGEST)) for _ in range(NUM_ROWS)]
    Path(sys.argv[1]).write_text("".join(json.dumps(each) + "\n" for each in rows))
