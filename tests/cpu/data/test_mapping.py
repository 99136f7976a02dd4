"""Rows of any data set become prompts: a map of columns, a template, a function of the user's own, hub names."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest

from skyrl_train.checks.training import data_problems, source_problems
from skyrl_train.config.training import HUB_SPLIT, DataConfig
from skyrl_train.data.mapping import RowMapping
from skyrl_train.data.prompts import LoadedPrompts, load_prompts
from skyrl_train.data.rows import read_rows
from skyrl_train.data.sft import ExampleReader
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer


@pytest.fixture(autouse=True)
def no_traces_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def load(source: Path | str, **mapping: Any) -> LoadedPrompts:
    return load_prompts(
        [str(source)],
        tokenizer=tiny_tokenizer(),
        max_prompt_length=200,
        default_env_class="gsm8k",
        chat_template_kwargs={},
        mapping=RowMapping(**mapping),
    )


def parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    datasets.Dataset.from_list(list(rows)).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_of_text_is_one_user_message_and_stays_among_the_columns(tmp_path):
    (prompt,) = load(parquet(tmp_path, {"prompt": "1+2=", "answer": "3"})).prompts
    assert prompt.messages == user("1+2=")
    assert prompt.extras == {"prompt": "1+2=", "answer": "3"}


def test_columns_are_renamed_and_the_answer_is_the_ground_truth(tmp_path):
    source = parquet(tmp_path, {"question": "1+2=", "solution": 3, "topic": "sums", "level": 1})
    names = {"prompt": "question", "answer": "solution", "data_source": "topic"}
    (prompt,) = load(source, columns=names).prompts
    assert (prompt.messages, prompt.data_source) == (user("1+2="), "sums")
    assert prompt.extras["reward_spec"] == {"method": "rule", "ground_truth": "3"}
    assert (prompt.extras["answer"], prompt.extras["level"], prompt.extras["question"]) == (3, 1, "1+2=")


def test_a_column_may_be_a_field_of_another_and_null_removes_one(tmp_path):
    """verl's files: the answer is in reward_model.ground_truth."""
    row = {"prompt": user("1+2="), "reward_model": {"style": "rule", "ground_truth": "3"}, "env_class": "other"}
    (prompt,) = load(parquet(tmp_path, row), columns={"answer": "reward_model.ground_truth", "env_class": None}).prompts
    assert prompt.extras["reward_spec"]["ground_truth"] == "3"
    assert prompt.env_class == "gsm8k"


def test_a_column_whose_name_contains_a_dot_is_found(tmp_path):
    assert load(parquet(tmp_path, {"a.b": "1="}), columns={"prompt": "a.b"}).prompts[0].messages == user("1=")


def test_without_a_map_an_answer_is_a_column_like_any_other(tmp_path):
    assert "reward_spec" not in load(parquet(tmp_path, {"prompt": "1+2=", "answer": "3"})).prompts[0].extras


def test_a_template_is_filled_from_columns_and_follows_the_system_prompt(tmp_path):
    source = parquet(tmp_path, {"question": "1+2=", "info": {"digits": 1}})
    (prompt,) = load(
        source, prompt_template="{question} in {info[digits]} digits, {{boxed}}", system_prompt="be brief"
    ).prompts
    asked = "1+2= in 1 digits, {boxed}"
    assert prompt.messages == [{"role": "system", "content": "be brief"}, *user(asked)]
    assert prompt.extras["prompt"] == asked


def test_a_system_prompt_is_put_before_messages_too_but_not_before_another(tmp_path):
    (prompt,) = load(parquet(tmp_path, {"prompt": user("1=")}), system_prompt="be brief").prompts
    assert [message["role"] for message in prompt.messages] == ["system", "user"] and "prompt" not in prompt.extras
    twice = parquet(tmp_path, {"prompt": prompt.messages})
    with pytest.raises(ValueError, match="rows.parquet, row 0: .*data.system_prompt is set and the row has a system"):
        load(twice, system_prompt="be brief")


def doubled(row: dict[str, Any]) -> dict[str, Any] | None:
    return None if row["n"] == 1 else {"prompt": f"{row['n']}+{row['n']}=", "reward_spec": {"ground_truth": "?"}}


def test_a_function_makes_rows_and_drops_some_and_the_others_keep_their_uids(tmp_path):
    loaded = load(parquet(tmp_path, {"n": 0}, {"n": 1}, {"n": 2}), row_fn=doubled)
    assert [(prompt.uid, prompt.messages) for prompt in loaded.prompts] == [("0", user("0+0=")), ("2", user("2+2="))]
    assert loaded.num_dropped == 0


def test_a_function_that_drops_every_row_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="data.row_fn doubled returned None for each of the 1 rows of .*rows.parquet"):
        load(parquet(tmp_path, {"n": 1}), row_fn=doubled)


@pytest.mark.parametrize(
    ("mapping", "problem"),
    [
        ({"columns": {"prompt": "question"}}, "data.columns.prompt is question: the row has no such column.*are text"),
        ({"columns": {"prompt": "text.a"}}, "data.columns.prompt is text.a: the row has no such column"),
        ({"prompt_template": "{question}"}, "data.prompt_template is '{question}': .*KeyError.* columns are text"),
        ({"prompt_template": "{text[a]}"}, "data.prompt_template is .*TypeError"),
        ({"prompt_template": "{none}", "columns": {"none": "none"}}, "a column is null"),
        ({"row_fn": doubled}, "data.row_fn doubled raised KeyError: 'n'. The columns are text, none"),
        ({"row_fn": lambda row: "x"}, "data.row_fn <lambda> returned 'x': it must return a dict, or None"),
        ({}, "`prompt` is missing. The columns are text, none. Name one in data.columns"),
    ],
)
def test_a_row_that_cannot_be_mapped_is_named_with_the_key(tmp_path, mapping, problem):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "1=", "none": None}) + "\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 1: .*{problem}"):
        load(tmp_path / "a.jsonl", **mapping)


def test_fine_tuning_reads_the_same_keys():
    row = {"instruction": "1+2=", "output": "3"}
    names = {"prompt": "instruction", "response": "output"}

    def text(**keys: Any) -> str:
        mapping, tokenizer = RowMapping(columns=names, **keys), chatml_tokenizer()
        made = mapping.row(row, "here")
        assert made is not None
        return tokenizer.decode(ExampleReader(tokenizer, "all", {}, 200, mapping).tokens(made)[0])

    assert text() == "1+2=3<|im_end|>", "a prompt of text alone is used as it is"
    assert "user\n1+2=!<|im_end|>" in text(prompt_template="{prompt}!")
    assert text(system_prompt="add.").startswith("<|im_start|>system\nadd.<|im_end|>\n<|im_start|>user\n1+2=")


def hub(folder: Path, *configs: str, default: str | None = None) -> Path:
    """A data set of several configurations, as a folder with the same card as on the hub."""
    card = "---\nconfigs:\n"
    for name in configs:
        card += f"- config_name: {name}\n  data_files: {name}.jsonl\n" + "  default: true\n" * (name == default)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(3)))
    (folder / "README.md").write_text(card + "---\n")
    return folder


def test_a_hub_name_may_have_a_configuration_and_a_slice(tmp_path, caplog):
    folder = hub(tmp_path, "main", "other")
    assert load(f"{folder}:main:train").prompts[0].messages == user("main0")
    assert [p.messages for p in load(f"{folder}:other:train[1:]").prompts] == [user("other1"), user("other2")]
    assert load(f"{folder}:train").prompts[0].messages == user("main0")
    assert "the data set has several configurations (main, other), and main is read" in caplog.text
    with pytest.raises(ValueError, match=f"Write one of {folder}:easy:train, {folder}:other:train"):
        load(f"{hub(folder, 'easy', 'other')}:train")
    assert load(f"{hub(folder, 'main', 'other', default='other')}:train").prompts[0].messages == user("other0")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("openai/gsm8k:train", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
        ("org/name:en-US:train[:10%]", ("org/name", "en-US", "train[:10%]")),
        ("org/name:train[10:]", ("org/name", None, "train[10:]")),
    ],
)
def test_the_parts_of_a_hub_name(name, parts):
    found = HUB_SPLIT.match(name)
    assert found is not None and (found["name"], found["config"], found["split"]) == parts
    assert not list(source_problems("train_data", [name]))


def problems(**keys: Any) -> list[str]:
    nothing = {"row_fn": None, "columns": {}, "prompt_template": None, "system_prompt": None}
    return list(data_problems(DataConfig(train_data=(), val_data=(), **{**nothing, **keys})))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"row_fn": "nowhere:row"}, "data.row_fn is 'nowhere:row', and nowhere cannot be imported"),
        (
            {"row_fn": "skyrl_train.tasks.gsm8k:NAME"},
            "tasks.gsm8k:NAME: it must be a function of one row",
        ),
        ({"columns": {"prompt": 3}}, "data.columns.prompt is 3: it must be the name of a column"),
        ({"prompt_template": "{question"}, "data.prompt_template is '{question': expected '}'"),
        ({"prompt_template": "\\boxed{} {question}"}, "write a column in braces, as in {question}"),
        ({"prompt_template": "no column"}, "write a column in braces"),
    ],
)
def test_wrong_keys_are_found_before_anything_starts(keys, problem):
    (found,) = problems(**keys)
    assert problem in found


def test_right_keys_are_no_problem():
    assert not problems(
        row_fn="skyrl_train.tasks.gsm8k:gsm8k_row", columns={"prompt": "q", "x": None}, prompt_template="{q} {{}}"
    )


def test_an_answer_is_the_text_that_environments_compare(tmp_path):
    source = parquet(tmp_path, *({"question": "?", "answer": answer} for answer in (72.0, 0.5)))
    prompts = load(source, columns={"prompt": "question", "answer": "answer"}).prompts
    assert [prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts] == ["72", "0.5"]

    exact = [Decimal("72.000"), Decimal("70.000"), Decimal("-0.500"), Decimal("12345678901234567890123456789.125")]
    source = parquet(tmp_path, *({"question": "?", "answer": answer} for answer in exact))
    prompts = load(source, columns={"prompt": "question", "answer": "answer"}).prompts
    found = [prompt.extras["reward_spec"]["ground_truth"] for prompt in prompts]
    assert found == ["72", "70", "-0.5", "12345678901234567890123456789.125"]


@pytest.mark.parametrize("answer", [{}, {"answer": "text"}])
def test_a_reward_spec_that_is_not_an_object_is_the_same_error_with_and_without_an_answer(tmp_path, answer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "1=", "reward_spec": "3"}) + "\n")
    with pytest.raises(ValueError, match="a.jsonl, line 1: `reward_spec` must be a dict, got str '3'"):
        load(tmp_path / "a.jsonl", columns={"prompt": "text", **answer})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(None, "this row's answer is null"), (date(2024, 1, 5), "the answer was read as a date, 2024-01-05")],
)
def test_a_row_without_an_answer_that_could_be_right_is_refused(tmp_path, answer, problem):
    source = parquet(tmp_path, {"question": "?", "answer": date(2024, 1, 1)}, {"question": "?", "answer": answer})
    mapping = RowMapping(columns={"answer": "answer"})
    with pytest.raises(ValueError, match=f"row 1: data.columns.answer: {problem}"):
        mapping.row({"answer": answer}, f"{source}, row 1")


def test_arrow_adds_no_arguments_to_tool_calls(tmp_path):
    def called(**arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*user("?"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    source = parquet(tmp_path, {"messages": called(city="Paris")}, {"messages": called(a=1, b=2)})
    assert [row["messages"] for _, row in read_rows([str(source)])] == [
        [*user("?"), {"role": "assistant", "content": "", "tool_calls": called(city="Paris")[1]["tool_calls"]}],
        called(a=1, b=2),
    ]
