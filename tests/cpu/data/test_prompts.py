import gzip
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from skyrl_train.config import load_config
from skyrl_train.data.order import Order
from skyrl_train.data.prompts import configured_prompts, load_prompts
from skyrl_train.data.rows import read_rows
from skyrl_train.types import Example, Prompt
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer


@pytest.fixture(autouse=True)
def no_traces_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def row(content="1+2=", **columns):
    return {"prompt": [{"role": "user", "content": content}], "reward_spec": {"ground_truth": "3"}, **columns}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def load(*sources, tokenizer=None, max_prompt_length=100, env_class="gsm8k", allowed=(), **options):
    return load_prompts(
        sources,
        tokenizer=tokenizer or tiny_tokenizer(),
        max_prompt_length=max_prompt_length,
        default_env_class=env_class,
        allowed_env_classes=allowed,
        chat_template_kwargs=options,
    )


ROWS = [row("1+2=", data_source="sums", env_class="addition"), row("say hi", extra_info={"index": 7})]


def test_row_becomes_a_prompt_with_all_other_columns_as_extras(tmp_path):
    first, second = load(write_jsonl(tmp_path / "a.jsonl", ROWS)).prompts
    assert first == Prompt(
        uid="0",
        messages=[{"role": "user", "content": "1+2="}],
        env_class="addition",
        extras={"reward_spec": {"ground_truth": "3"}, "data_source": "sums"},
        data_source="sums",
    )
    assert (second.uid, second.env_class, second.data_source) == ("1", "gsm8k", "unknown")
    assert second.extras["extra_info"] == {"index": 7}


def test_every_file_format_gives_the_same_prompts(tmp_path):
    rows = [row(f"{i}+2=", data_source="sums", env_class="addition") for i in range(3)]
    expected = load(write_jsonl(tmp_path / "a.jsonl", rows)).prompts
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    write_jsonl(tmp_path / "lines.json", rows)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "hub" / "train.parquet")
    for source in ("a.json", "lines.json", "a.jsonl.gz", "hub/train.parquet", "hub:train"):
        assert load(str(tmp_path / source)).prompts == expected, source


def test_several_sources_are_joined_and_uids_count_on(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert [p.uid for p in load(source, source).prompts] == ["0", "1", "2", "3"]


def test_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert len(load("~/a.jsonl").prompts) == 2


def test_prompts_longer_than_the_limit_are_dropped_and_counted_and_the_others_keep_their_uids(tmp_path):
    rows = [row("a" * 9), row("a" * 10), row("a" * 11), row("a")]
    loaded = load(write_jsonl(tmp_path / "a.jsonl", rows), max_prompt_length=10)
    assert [p.uid for p in loaded.prompts] == ["0", "1", "3"]
    assert loaded.num_dropped == 1


def test_prompt_length_counts_the_chat_template_and_its_variables(tmp_path):
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template += "{% if think %}think{% endif %}"
    source = write_jsonl(tmp_path / "a.jsonl", [row("hi")])
    messages = [{"role": "user", "content": "hi"}]
    for options in ({}, {"think": True}):
        length = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options))
        assert load(source, tokenizer=tokenizer, max_prompt_length=length, **options).num_dropped == 0
        with pytest.raises(
            ValueError, match=f"max_prompt_length is {length - 1}: .* .the shortest prompt has {length}"
        ):
            load(source, tokenizer=tokenizer, max_prompt_length=length - 1, **options)


def test_json_values_stay_as_they_were_written(tmp_path):
    rows = [row(reward_spec={"ground_truth": "2024-01-01"}), row(reward_spec={"ground_truth": 3, "other": None})]
    prompts = load(write_jsonl(tmp_path / "a.jsonl", rows)).prompts
    assert [p.extras["reward_spec"] for p in prompts] == [r["reward_spec"] for r in rows]


def test_fields_that_parquet_adds_to_messages_are_left_out(tmp_path):
    rows = [row(), {**row(), "prompt": [{"role": "user", "content": "x", "name": "kim"}]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    first, second = load(str(tmp_path / "a.parquet")).prompts
    assert first.messages == [{"role": "user", "content": "1+2="}]
    assert second.messages == [{"role": "user", "content": "x", "name": "kim"}]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"question": "1+2="}, "`prompt` is missing. The columns are question"),
        ({"prompt": 3}, "invalid `prompt`: expected text or a list of chat messages, got int 3"),
        ({"prompt": []}, "`prompt` has no messages"),
        ({"prompt": ["hi"]}, "message 0 must be a dict with `role` and `content`"),
        (
            {"prompt": [{"role": "user"}]},
            "message 0 has `content` null or absent, which only a message with `tool_calls`",
        ),
        (row(None), "message 0 has `content` null or absent, which only a message with `tool_calls` may have, got"),
        ({"prompt": [{"content": "x"}]}, "message 0 has role None: it must be one of system"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "message 0 has role 'robot': it must be one of system"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "`content` of message 0 must be text, got list",
        ),
        (row(env_class=3), "`env_class` must be a str, got int 3"),
        (row(reward_spec="3"), "`reward_spec` must be a dict, got str '3'"),
        (row(data_source=["a"]), "`data_source` must be a str"),
        ([1, 2], "a row must be a JSON object, got list"),
    ],
)
def test_malformed_row_is_an_error_that_names_file_line_and_problem(tmp_path, bad, problem):
    source = write_jsonl(tmp_path / "rows.jsonl", [row(), bad])
    with pytest.raises(ValueError, match=f"rows.jsonl, line 2: .*{problem}"):
        load(source)


@pytest.fixture
def only_short_texts_are_tokenised(monkeypatch):
    """60 MB in a tokenizer took 21.7 GB of memory and did not end."""
    tokenise = PreTrainedTokenizerFast.__call__

    def checked(self, text, *args, **kwargs):
        assert max(map(len, [text] if isinstance(text, str) else text)) <= 1_000_000
        return tokenise(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", checked)


def test_a_row_of_60_mb_is_dropped_without_being_tokenised(tmp_path, only_short_texts_are_tokenised):
    loaded = load(write_jsonl(tmp_path / "a.jsonl", [row("1" * 60_000_000), row("1+2=")]))
    assert [p.uid for p in loaded.prompts] == ["1"] and loaded.num_dropped == 1


def test_prompts_that_are_not_tokenised_count_as_too_long(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [row("1" * 1_200_000), row("1+2=")])
    with pytest.raises(ValueError, match=r"max_prompt_length is 2: .* .the shortest prompt has 4"):
        load(source, max_prompt_length=2)


def test_a_prompt_that_may_have_few_enough_tokens_is_tokenised_however_long(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["1" * 30_000])
    assert len(load(write_jsonl(tmp_path / "a.jsonl", [row("1" * 1_200_000)]), tokenizer=tokenizer).prompts) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (json.dumps(row("ok\ud800")), r"the text .*ends with half of a surrogate pair"),
        (json.dumps(row(extra_info={"author": "\udfff"})), r"the text .*ends with half of a surrogate pair"),
        (json.dumps(row(**{"\ud83d": 1})), r"the text .*ends with half of a surrogate pair"),
        (json.dumps(row("")), "`prompt` is empty: the chat template renders it to no token"),
        (json.dumps(row("")).replace("user", "system"), "`prompt` is empty"),
        ('{"prompt": [], "prompt": [{"role": "user", "content": "1"}]}', "key 'prompt' is repeated"),
        ('{"prompt": [{"role": "user", "content": "1", "content": "2"}]}', "key 'content' is repeated"),
        ('{"prompt": ' + "[" * 100_000, "unusable JSON: maximum recursion depth"),
        ('{"prompt": ' + "9" * 5_000 + "}", "unusable JSON: Exceeds the limit"),
        ('{"prompt": NaN}', "expected text or a list of chat messages, got float nan"),
        ('{"prompt": ' + "[" * 500 + "]" * 500 + "}", "message 0 must be a dict .*, got \\["),
        (json.dumps(row(reward_spec="x" * 10_000)), "must be a dict, got str 'x{10,60}"),
    ],
    ids=lambda value: value[:60],
)
def test_a_line_that_no_prompt_can_be_made_of_is_named(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row())}\n{line}\n")
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: .*{problem}") as caught:
        load(str(tmp_path / "a.jsonl"))
    assert len(str(caught.value)) < 500


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json.dumps(row()).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="a.jsonl, line 2: not UTF-8"):
        load(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path, name):
    text = json.dumps([row()]) if name == "a.json" else json.dumps(row()) + "\r\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load(str(tmp_path / name)).prompts == load(write_jsonl(tmp_path / "b.jsonl", [row()])).prompts


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row("\N{GRINNING FACE}")) + "\n")
    assert "\\ud83d" in (tmp_path / "a.jsonl").read_text()
    assert load(str(tmp_path / "a.jsonl")).prompts[0].messages[0]["content"] == "\N{GRINNING FACE}"


def test_a_row_that_the_chat_template_refuses_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}1"
    bad = {"prompt": [{"role": "tool", "content": "1"}]}
    with pytest.raises(ValueError, match="a.jsonl, line 2: the chat template rejected .*: no tools"):
        load(write_jsonl(tmp_path / "a.jsonl", [row(), bad]), tokenizer=tokenizer)


def test_malformed_parquet_row_is_an_error_that_names_its_index(tmp_path):
    datasets.Dataset.from_list([row(), {"prompt": None}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet, row 1: `prompt` is missing"):
        load(str(tmp_path / "a.parquet"))


def test_unreadable_json_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(row()) + "\n\n" + '{"prompt": [}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 3: invalid JSON: .*\(character 13\)"):
        load(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("missing.parquet", "data file .*missing.parquet does not exist"),
        ("empty.jsonl", "data file .*empty.jsonl is empty"),
        ("none.json", "data source .*none.json has no rows"),
        ("torn.parquet", "data source .*torn.parquet cannot be read: .*Parquet"),
        ("hub:test", "data source .*hub:test cannot be read: .*train"),
        ("rows.csv", "neither a file .* nor `hub_name:split`"),
        ("*.json.gz", r"data source .*\*.json.gz: no file matches /.*/\*.json.gz"),
    ],
)
def test_source_that_cannot_be_read_is_an_error_that_names_it(tmp_path, source, problem, caplog):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "torn.parquet").write_text("PAR1 not really")
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_list([row()]).to_parquet(tmp_path / "hub" / "train.parquet")
    with pytest.raises(ValueError, match=problem):
        load(str(tmp_path / source))
    assert not caplog.records, "the library's own lines would repeat the error"


def test_an_existing_file_whose_name_is_a_pattern_is_that_file_alone(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "w1.jsonl", [row("first")])
    for name in ("w[1].jsonl", "w?.jsonl"):
        assert [prompt.messages[0]["content"] for prompt in load(str(tmp_path / name)).prompts] == ["first"]
        write_jsonl(tmp_path / name, [row(name)])
        assert [prompt.messages[0]["content"] for prompt in load(str(tmp_path / name)).prompts] == [name]
    (tmp_path / "run[3]").mkdir()
    monkeypatch.chdir(tmp_path / "run[3]")
    assert load(write_jsonl(Path("a.jsonl"), [row("relative")])).prompts[0].messages[0]["content"] == "relative"


def test_each_file_of_a_pattern_may_hold_an_array_and_errors_name_it(tmp_path):
    for name, rows in (("b", [row("second"), row("third")]), ("a", [row("first")])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    write_jsonl(tmp_path / "c.json", [row("fourth")])
    pattern = str(tmp_path / "*.json")
    asked = [prompt.messages[0]["content"] for prompt in load(pattern).prompts]
    assert asked == ["first", "second", "third", "fourth"]
    (tmp_path / "d.json").write_text('[{"prompt": 1]')
    with pytest.raises(ValueError, match=r"d\.json: invalid JSON"):
        load(pattern)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_an_error_in_one_of_several_files_names_it_and_its_own_line_or_row(tmp_path, ending):
    """The others are of other lengths; one has an empty line, which counts."""
    for folder, rows in (("b", [row(), {"prompt": None}]), ("a", [row()] * 5), ("c", [row()])):
        (tmp_path / folder).mkdir()
        text = "\n" + "".join(json.dumps(each) + "\n" for each in rows)
        if ending == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(tmp_path / folder / "rows.parquet")
        else:
            (tmp_path / folder / f"rows.{ending}").write_bytes(
                gzip.compress(text.encode()) if ending.endswith("gz") else text.encode()
            )
    where = "row 1" if ending == "parquet" else "line 3"
    with pytest.raises(ValueError, match=f"^{tmp_path}/b/rows.{ending}, {where}: `prompt` is missing"):
        load(str(tmp_path / f"*/rows.{ending}"))


def test_prompts_that_end_with_an_answer_are_reported_once(tmp_path, caplog):
    answered = row("1+2=")
    answered["prompt"].append({"role": "assistant", "content": "3"})
    config = load_config([])
    for rows in ([row("1+1=")], [row("1+1="), answered, answered]):
        configured_prompts(config, tiny_tokenizer(), [write_jsonl(tmp_path / f"{len(rows)}.jsonl", rows)])
    (warning,) = caplog.messages
    assert warning.startswith("2 of 3 prompts end with a message of the assistant, the first one is prompt 1 from ")


def test_prompts_know_the_file_and_line_of_their_rows_of_which_some_may_be_dropped(tmp_path):
    sources = [write_jsonl(tmp_path / f"{name}.jsonl", [row("1"), row("12345"), row("2")]) for name in "ab"]
    names = [prompt.name for prompt in load(*sources, max_prompt_length=2).prompts]
    assert names[1:3] == [f"prompt 2 from {sources[0]}, line 3", f"prompt 3 from {sources[1]}, line 1"]
    datasets.Dataset.from_list([row()] * 2).to_parquet(tmp_path / "a.parquet")
    prompts = load(str(tmp_path / "*.parquet")).prompts
    assert prompts[1].name == f"prompt 1 from {tmp_path}/a.parquet, row 1"


def test_bytes_and_files_that_cannot_be_read_are_named_in_a_pattern_too(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [row()])
    (tmp_path / "b.jsonl").write_bytes(json.dumps(row()).encode() + b"\n\xff\n")
    with pytest.raises(ValueError, match=r"/b\.jsonl, line 2: not UTF-8"):
        load(str(tmp_path / "*.jsonl"))
    datasets.Dataset.from_list([row()]).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list([{"prompt": 3}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"\(/.*/b.parquet, whose columns are not those of /.*/a.parquet\) cannot be"):
        load(str(tmp_path / "*.parquet"))
    (tmp_path / "b.parquet").write_text("PAR1 not really")
    with pytest.raises(ValueError, match=r"\*.parquet \(/[^ ]*/b.parquet\) cannot be read"):
        load(str(tmp_path / "*.parquet"))


def test_rows_of_files_that_were_edited_since_are_named_by_their_pattern(tmp_path):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [row()] * 2)
    pattern = str(tmp_path / "*.jsonl")
    *_, last = [where for where, _ in read_rows([pattern])]
    assert str(last) == f"{tmp_path}/b.jsonl, line 2"
    again = [where for where, _ in read_rows([pattern])][-1]
    write_jsonl(tmp_path / "a.jsonl", [row()])
    assert str(again) == str(last), "known since the first time"
    third = [where for where, _ in read_rows([pattern])][-1]
    write_jsonl(tmp_path / "a.jsonl", [row()] * 3)
    assert str(third) == f"{pattern}, line 3"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "*.jsonl", ":train", ":main:train"])
def test_a_file_that_another_with_its_time_replaced_is_read_again_and_otherwise_its_cache(tmp_path, name):
    (folder := tmp_path / "hub").mkdir()
    configs = [{"config_name": "main", "data_files": "a.parquet"}]
    (folder / "README.md").write_text("---\n" + json.dumps({"configs": configs}) + "\n---\n" if "main" in name else "")

    def read(answer):
        """Messages, and the files of the cache with their times."""
        path = folder / ("a.parquet" if ":" in name else name.replace("*", "a"))
        if answer:
            write_jsonl(path, [row(answer)])
            if path.suffix == ".parquet":
                datasets.Dataset.from_list([row(answer)]).to_parquet(path)
            os.utime(path, (0, 0))
        source = f"{folder}{name}" if ":" in name else str(folder / name)
        messages = [prompt.messages[0]["content"] for prompt in load(source).prompts]
        return messages, {(file, file.stat().st_mtime_ns) for file in (tmp_path / "cache").rglob("*.arrow")}

    assert read("old")[0] == ["old"]
    messages, cached = read("new")
    assert messages == ["new"]
    assert read("") == (["new"], cached)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(ValueError, match=r"a.jsonl cannot be read: .*. Rows are cached in .*file/cache: check the"):
        load(write_jsonl(tmp_path / "a.jsonl", [row()]))


def test_an_unreadable_file_of_a_pattern_is_no_fault_of_the_cache(tmp_path, monkeypatch):
    def refused(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.jsonl"))

    monkeypatch.setattr(datasets, "load_dataset", refused)
    write_jsonl(tmp_path / "a.jsonl", [row()])
    with pytest.raises(ValueError, match="cannot be read: PermissionError: .*a.jsonl'$"):
        load(str(tmp_path / "*.jsonl"))


def test_a_hub_that_does_not_answer_is_an_error_with_what_to_check(monkeypatch: pytest.MonkeyPatch):
    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'nobody/nothing' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match="nobody/nothing:test cannot be read: .*Check the name, the network and"):
        load("nobody/nothing:test")


READ = """
from skyrl_train.config.rl import RL
from skyrl_train.data.prompts import configured_prompts
from tests.support.tiny import tiny_tokenizer
config = RL.read(["trainer.download_timeout_s=2", "trainer.policy.model.path=m", "data.train_data=[unused.jsonl]"])
configured_prompts(config, tiny_tokenizer(), ["nobody/nothing:train"])
"""


def test_a_silent_hub_ends_at_the_deadline_of_downloads_and_the_process_can_exit(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and answers none
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", READ]
        ended = subprocess.run(command, env=os.environ | hub, timeout=300, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == (
        "ValueError: trainer.download_timeout_s is 2: data source nobody/nothing:train was not loaded within this many "
        "seconds. Raise it, or check the network; files that are complete are not downloaded again"
    )


def test_tokenizer_without_chat_template_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        load(write_jsonl(tmp_path / "a.jsonl", ROWS), tokenizer=tokenizer)


def prompts(n):
    return [Prompt(str(i), [], "gsm8k", {}, "unknown") for i in range(n)]


def uids(batches):
    return [[p.uid for p in batch] for batch in batches]


def test_epoch_is_a_shuffle_without_repeats_and_drops_the_last_partial_batch():
    order = Order(prompts(10), batch_size=4, seed=1)
    first, second = [[p.uid for _ in range(2) for p in order.next_batch()] for _ in range(2)]
    assert len(set(first)) == len(set(second)) == 8
    assert first != second and first != sorted(first)


def test_order_depends_on_the_seed_and_not_on_seed_plus_epoch():
    def epoch(seed, index):
        order = Order(prompts(100), batch_size=100, seed=seed)
        return uids([order.next_batch() for _ in range(index + 1)])[index]

    assert epoch(42, 0) == epoch(42, 0)
    assert epoch(42, 0) != epoch(43, 0)
    assert epoch(42, 1) != epoch(43, 0)


def test_epoch_is_that_of_the_rows_given_out_last():
    order = Order(prompts(10), batch_size=4, seed=1)
    epochs = [(order.next_batch(), order.epoch)[1] for _ in range(5)]
    assert epochs == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("at_once", [1, 3, 4, 7])
def test_order_does_not_depend_on_how_many_rows_are_taken_at_once(at_once):
    batches = Order(prompts(10), batch_size=4, seed=1)
    expected = [(prompt.uid, batches.epoch) for _ in range(5) for prompt in batches.next_batch()]
    order, rows = Order(prompts(10), batch_size=4, seed=1), []
    while len(rows) < len(expected):
        rows += [(prompt.uid, order.epoch) for prompt in order.next_rows(min(at_once, len(expected) - len(rows)))]
    assert rows == expected


@pytest.mark.parametrize("changed", [{"extras": {"answer": 3}}, {"messages": [{"role": "user", "content": "x"}]}])
def test_rows_that_changed_since_a_checkpoint_are_warned_of(changed, caplog):
    rows = prompts(10)
    state = json.loads(json.dumps(Order(rows, batch_size=4, seed=1).state))
    Order(prompts(10), batch_size=4, seed=1).resume(state)
    Order(rows, batch_size=4, seed=1).resume(state | {"sha256": None})
    Order([replace(row, location="moved.jsonl") for row in rows], batch_size=4, seed=1).resume(state)
    assert not caplog.records
    Order([replace(rows[0], **changed), *rows[1:]], batch_size=4, seed=1).resume(state)
    assert "the training rows have changed since the checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("saved", "now", "differs"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({"image": b"12"}, {"image": b"13"}, True),
        ({"n": np.int64(1)}, {"n": np.int64(2)}, True),
        ({(1, 2): 3}, {(1, 2): 3}, False),  # JSON has no such keys
    ],
)
def test_contents_of_rows_are_compared_where_they_are_json_or_bytes(saved, now, differs, caplog):
    rows = prompts(4)
    state = Order([replace(rows[0], extras=saved), *rows[1:]], batch_size=4, seed=1).state
    Order([replace(rows[0], extras=now), *rows[1:]], batch_size=4, seed=1).resume(state)
    assert bool(caplog.records) == differs


def test_of_many_rows_some_are_compared(monkeypatch, caplog):
    monkeypatch.setattr("skyrl_train.data.order.HASHED_ROWS", 3)
    state = Order(prompts(10), batch_size=4, seed=1).state
    Order(prompts(10), batch_size=4, seed=1).resume(state)
    assert not caplog.records
    Order(prompts(10)[::-1], batch_size=4, seed=1).resume(state)
    assert "the training rows have changed" in caplog.text


def test_examples_that_changed_since_a_checkpoint_are_warned_of(caplog):
    rows = [Example(torch.arange(n + 2), torch.ones(n + 2, dtype=torch.bool)) for n in range(4)]
    state = Order(rows, batch_size=4, seed=1).state
    Order(rows, batch_size=4, seed=1).resume(state)
    assert not caplog.records
    Order([*rows[:3], rows[0]], batch_size=4, seed=1).resume(state)
    assert "the training rows have changed" in caplog.text


def test_batch_larger_than_the_data_set_is_refused():
    with pytest.raises(ValueError, match="train_batch_size is 11: it must be between 1 and .*10"):
        Order(prompts(10), batch_size=11, seed=1)


def test_a_row_cannot_choose_code_that_the_configuration_does_not_name(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [row("1"), row("2", env_class="os:system")])
    with pytest.raises(
        ValueError, match=r"a\.jsonl.*2.*`env_class` is 'os:system': rows may import only what the conf"
    ):
        load(source)
    assert load(source, env_class="os:system").prompts[0].env_class == "os:system"
    assert load(source, allowed=["other:Env", "os:system"]).prompts[1].env_class == "os:system"
