"""Data sets of 0.4's contract."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl_train.dataset import PromptDataset

from skyrl_train.compat.dataset import prompts_of
from skyrl_train.types import Prompt
from tests.support.tiny import tiny_tokenizer

SUM = [{"role": "user", "content": "1+2="}]
LONG = [{"role": "user", "content": "1+2+3+4+5="}]


def test_rows_of_other_column_names_are_read_and_long_ones_left_out(tmp_path: Path):
    rows = [{"question": SUM, "env": "sums", "level": 1}, {"question": LONG, "env": "sums", "level": 2}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = PromptDataset([str(file)], tiny_tokenizer(), 6, prompt_key="question", env_class_key="env")
    assert len(dataset) == 1
    messages, env_class, extras, uid = dataset[0]
    assert (messages, env_class, uid) == (SUM, "sums", "0") and extras["level"] == 1
    assert dataset.collate_fn([dataset[0]]) == [
        {"prompt": SUM, "env_class": "sums", "env_extras": extras, "uid": "0"},
    ]


def test_rows_of_files_keep_their_locations(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps({"prompt": SUM}) + "\n"))
    dataset = PromptDataset(str(tmp_path / "rows.jsonl"), tiny_tokenizer(), 100)
    assert [str(prompt.location) for prompt in prompts_of(dataset, "mine")] == [
        f"{tmp_path}/rows.jsonl, line {number}" for number in (1, 2)
    ]


def test_any_object_of_the_contract_gives_the_prompts_of_a_run():
    class Folders:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[object, ...]:
            return f"task_{index}", None, {"data_source": "folders"} if index else None, index

    assert prompts_of(Folders(), "mine") == [
        Prompt("0", "task_0", "mine", {}, "unknown"),  # type: ignore[arg-type]
        Prompt("1", "task_1", "mine", {"data_source": "folders"}, "folders"),  # type: ignore[arg-type]
    ]
    assert prompts_of(None, "mine") == []


def test_rows_of_any_form_become_prompts_by_the_collate_fn_of_their_data_set():
    class Tasks(list[dict[str, object]]):
        def collate_fn(self, items: list[dict[str, object]]) -> list[dict[str, object]]:
            return [
                {"prompt": each["path"], "env_class": None, "env_extras": {}, "uid": each["name"]} for each in items
            ]

    assert prompts_of(Tasks([{"name": "a", "path": "tasks/a"}]), "mine") == [
        Prompt("a", "tasks/a", "mine", {}, "unknown"),  # type: ignore[arg-type]
    ]
