"""Random rows and jobs: each is loaded within the limits, or refused by one ValueError that names its place.

`python -m tests.support.fuzz_rows --cases 10000` from the repository; case N is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from skyrl_train.config import load_config
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.prompts import load_prompts
from skyrl_train.data.sft import load_examples
from skyrl_train.service.job_reader import JobReader
from skyrl_train.tasks.sft_quickstart import CHAT_TEMPLATE as MARKED
from tests.support.random_rows import VOCABULARY, rl_row, sample, sft_row, spoiled
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer

MAX_TOKENS = 200
LARGEST_RSS_MB = 4000
LONGEST_S = 60.0
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
WHOLE_FILE = (
    "cannot be read",
    "is empty",
    "invalid JSON",
    "unusable JSON",
    "no prompt of ",
    "has no rows",
    "no row has ",
    "the shortest row has ",
)
"""Parts of errors that no single row is to blame for."""


def tokenizers() -> list[Any]:
    """Templates that join, frame, refuse and mark."""
    strict, marked = tiny_tokenizer(), chatml_tokenizer()
    strict.chat_template, marked.chat_template = STRICT, MARKED
    return [tiny_tokenizer(), chatml_tokenizer(), strict, marked]


def write(folder: Path, rows: list[Any], rng: random.Random) -> tuple[Path, bool]:
    """Write the rows in a format that can hold them; returns the file and whether its bytes were damaged."""
    if rng.random() < 0.25 and all(isinstance(row, dict) for row in rows):
        try:
            columns = dict.fromkeys(key for row in rows for key in row)
            table = pyarrow.Table.from_pylist([dict.fromkeys(columns) | row for row in rows])
            pyarrow.parquet.write_table(table, folder / "rows.parquet")
            return folder / "rows.parquet", False
        except Exception:  # whatever a table cannot hold: mixed types, half of a surrogate pair, large numbers
            pass
    ascii_only = rng.random() < 0.5 or any(re.search(r"\\ud[89a-f]", json.dumps(row)) for row in rows)
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    if rng.random() < 0.25:
        path, written = folder / "rows.json", f"[{', '.join(lines)}]"
    else:
        path, written = folder / rng.choice(["rows.jsonl", "rows.json"]), "".join(f"{line}\n" for line in lines)
    content = written.encode()
    damaged = rng.random() < 0.15
    if damaged:
        at, kind = rng.randrange(len(content)), rng.randrange(5)
        extra = rng.choice(
            [b"\xff", b"\x00", b"}", b'"', b"[" * 4000, b"9" * 5000, b"\\ud800", b"\xef\xbb\xbf", b"\n", b"NaN"]
        )
        content = [
            content[:at],
            content[:at] + extra + content[at:],
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
            content.replace(b'"prompt"', b'"prompt": 1, "prompt"', 1).replace(b'"content"', b'"role"', 1),
            b"",
        ][kind]
    path.write_bytes(content)
    return path, damaged


def load(path: Path, rl: bool, tokenizer: Any, rng: random.Random) -> int:
    """Load the file and check what was loaded; returns the number of rows that were read."""
    limit = rng.choice([40, MAX_TOKENS])
    if rl:
        loaded = load_prompts(
            [str(path)], tokenizer=tokenizer, max_prompt_length=limit, default_env_class="e", chat_template_kwargs={}
        )
        chat = ChatTemplate(tokenizer, {})
        assert all(1 <= len(chat.prompt_ids(prompt.messages)) <= limit for prompt in loaded.prompts)
        json.dumps([prompt.extras for prompt in loaded.prompts], ensure_ascii=False, default=str).encode()
        return len(loaded.prompts) + loaded.num_dropped
    examples = load_examples(
        [str(path)], tokenizer=tokenizer, vocab_size=VOCABULARY, max_length=limit, truncate=rng.random() < 0.5,
        assistant_turns=rng.choice(["all", "last"]), chat_template_kwargs={},
    )  # fmt: skip
    for one in examples.examples:
        assert 2 <= len(one.token_ids) == len(one.loss_mask) <= limit
        assert one.token_ids.min() >= 0 and one.token_ids.max() < VOCABULARY
        assert one.loss_mask.any() and not one.loss_mask[0]
    return len(examples.examples) + examples.num_dropped


def run_rows(rng: random.Random, tokenizer: Any, folder: Path) -> str:
    """One file of rows, of which one may be spoiled. Returns: what came of it."""
    rl = rng.random() < 0.5
    rows: list[Any] = [(rl_row if rl else sft_row)(rng) for _ in range(rng.choice([1, 2, 4]))]
    bad = rng.randrange(len(rows)) if rng.random() < 0.8 else None
    if bad is not None:
        for _ in range(rng.choice([1, 1, 2])):
            rows[bad] = spoiled(rows[bad], rng)
    path, damaged = write(folder, rows, rng)
    try:
        num_read = load(path, rl, tokenizer, rng)
    except ValueError as error:
        message = str(error)
        assert path.name in message and len(message) < 1500, message
        if not any(part in message for part in WHOLE_FILE):
            found = re.search(rf"{path.name}, (row|line) (\d+)", message)
            assert found is not None, message
            assert damaged or int(found[2]) - (found[1] == "line") == bad, f"{message} (not row {bad})"
        return "refused"
    assert damaged or num_read == len(rows)
    return "loaded"


def run_job(rng: random.Random, readers: list[JobReader]) -> str:
    """One job of a service. Returns: what came of it."""
    reader, trains = rng.choice(readers), rng.random() < 0.6
    given: Any = [[sample(rng) for _ in range(2)] for _ in range(rng.choice([1, 2]))]
    if not trains:
        given = [sft_row(rng) for _ in range(2)]
    is_good = rng.random() < 0.2
    given = given if is_good else spoiled(given, rng)
    try:
        if trains:
            for group in reader.train(given).groups:
                for one in group.samples:
                    assert len(one.token_ids) <= MAX_TOKENS and one.token_ids.max() < VOCABULARY
                    assert one.rollout_logprobs.isfinite().all() and math.isfinite(one.reward)
        else:
            assert all(len(one.token_ids) <= MAX_TOKENS for one in reader.sft(given).examples)
    except ValueError as error:
        assert re.search(r"group|row", str(error)) and len(str(error)) < 1500, str(error)
        return "refused"
    return "loaded"


def run_case(seed: int, folder: Path, all_tokenizers: list[Any], readers: list[JobReader]) -> str:
    """Case number `seed`. Raises: AssertionError, or what the code under test must not raise."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return run_job(rng, readers)
    return run_rows(rng, rng.choice(all_tokenizers), folder)


def make() -> tuple[list[Any], list[JobReader]]:
    """Tokenizers, and services with them."""
    config = load_config(["trainer.policy_mini_batch_size=2", "trainer.train_batch_size=2"])
    made = tokenizers()
    return made, [JobReader(config, tokenizer, VOCABULARY, MAX_TOKENS) for tokenizer in made]


def main() -> int:
    """Run cases, print those that failed and the largest times and memory; exit code 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    counts = {"loaded": 0, "refused": 0}
    failed: list[int] = []
    seconds = [0.0]
    made = make()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            datasets.config.HF_DATASETS_CACHE = f"{folder}/cache"
            try:
                counts[run_case(seed, Path(folder), *made)] += 1
            except Exception as error:
                failed.append(seed)
                print(f"case {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        seconds.append(time.process_time() - started)
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{counts}, failed {failed}, longest {max(seconds):.1f} s, at most {megabytes} MB")
    return int(bool(failed) or max(seconds) > LONGEST_S or megabytes > LARGEST_RSS_MB)


if __name__ == "__main__":
    sys.exit(main())
