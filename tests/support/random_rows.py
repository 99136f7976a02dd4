"""Rows and samples that are in order, values of any type, and rows with one thing spoiled; all from a random.Random."""

from __future__ import annotations

import math
import random
from typing import Any

VOCABULARY = 66
Row = dict[str, Any]


def text(rng: random.Random) -> str:
    """Something to say, of at least one token."""
    return "".join(rng.choices("0123456789+= abcxyz", k=rng.choice([1, 3, 20, 150, 400]))).strip() or "1"


def odd_text(rng: random.Random) -> str:
    """Empty, blank, long, control and special characters, scripts, halves of surrogate pairs."""
    choices = [
        "",
        " ",
        "\n\t",
        "\x00",
        "\u2028\x85\x0c",
        "\ud800",
        "ok\udfff",
        "\ufeffa",
        "é中文🙂\u202e",
        "<|im_end|>",
    ]
    choices += ["{{ 7 * 7 }}", "{% generation %}", "2024-01-01", "null", "NaN", "\\ud800", "a" * 5000, "🙂" * 300]
    if rng.random() < 0.01:
        choices = ["z" * rng.choice([999_000, 1_100_000, 3_000_000]), " " * 2_000_000]
    return rng.choice(choices)


def junk(rng: random.Random, depth: int = 3) -> Any:
    """A value of any type that JSON or parquet can hold."""
    kind = rng.randrange(16)
    if kind < 5:
        return rng.choice([odd_text, text])(rng)
    if kind < 9:
        return rng.choice(
            [None, True, False, 0, -1, 1, 65, 66, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, math.nan, math.inf]
        )
    if kind == 9:
        return {}
    if kind == 10:
        return []
    if depth == 0:
        return None
    if kind < 13:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 13:
        return nested(rng.choice([10, 300, 800]), rng.random() < 0.5)
    return {
        rng.choice(["role", "content", "prompt", "name", odd_text(rng)[:20]]): junk(rng, depth - 1) for _ in range(3)
    }


def nested(depth: int, objects: bool) -> Any:
    """Brackets inside each other."""
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value} if objects else [value]
    return value


def conversation(rng: random.Random, answered: bool) -> list[Row]:
    """Turns that every template accepts."""
    turns = [
        {"role": role, "content": text(rng)} for _ in range(rng.choice([1, 1, 2])) for role in ("user", "assistant")
    ]
    return turns if answered else turns[:-1]


def rl_row(rng: random.Random) -> Row:
    """A row of reinforcement learning that is in order."""
    row: Row = {"prompt": conversation(rng, False), "reward_spec": {"ground_truth": text(rng)}}
    if rng.random() < 0.5:
        row |= {"data_source": "sums", "env_class": "addition", "extra_info": {"index": rng.randrange(9)}}
    return row


def sft_row(rng: random.Random) -> Row:
    """A row of fine-tuning that is in order, of any format."""
    kind = rng.randrange(4)
    if kind == 0:
        return {"messages": conversation(rng, True)}
    if kind == 1:
        return {"prompt": text(rng), "response": text(rng)}
    if kind == 2:
        return {"prompt": conversation(rng, False), "response": text(rng)}
    ids = [rng.randrange(VOCABULARY) for _ in range(rng.choice([2, 9, 300]))]
    mask = [0, 1, *(rng.randrange(2) for _ in ids[2:])]
    labels = [token if on else -100 for token, on in zip(ids, mask, strict=True)]
    return {"input_ids": ids, **rng.choice([{"loss_mask": mask}, {"labels": labels}])}


def sample(rng: random.Random) -> Row:
    """A sample of a service's job that is in order."""
    if rng.random() < 0.4:
        return {"messages": conversation(rng, True), "reward": rng.random()}
    num = rng.choice([2, 5, 150])
    given: Row = {"token_ids": [rng.randrange(VOCABULARY) for _ in range(num)], "loss_mask": [0, *[1] * (num - 1)]}
    if rng.random() < 0.5:
        given |= {"logprobs": [-rng.random() for _ in range(num)], "policy_versions": [0] * num}
    return given | {"reward": rng.choice([0, 1.0, -3.5])}


def spoiled(value: Any, rng: random.Random) -> Any:
    """The value with one thing changed at a random depth: replaced, removed, repeated or renamed."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return junk(rng)
    copy: Any = value.copy()
    keys = list(copy) if isinstance(copy, dict) else list(range(len(copy)))
    key, what = rng.choice(keys), rng.random()
    if what < 0.7:
        copy[key] = spoiled(copy[key], rng)
    elif what < 0.8:
        del copy[key]
    elif isinstance(copy, list):
        copy.insert(key, rng.choice([copy[key], junk(rng)]))
    else:
        copy[rng.choice(["messages", "prompt", "response", "labels", odd_text(rng)[:20]])] = rng.choice(
            [copy[key], junk(rng)]
        )
    return copy
