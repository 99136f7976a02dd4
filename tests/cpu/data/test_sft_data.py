"""Rows of fine-tuning: the tokens of the assistant are trained, no other, and a bad row is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from skyrl_train.batching.build import build_examples
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import split
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.conversation import Conversations
from skyrl_train.data.sft import ExampleReader, LoadedExamples, load_examples
from skyrl_train.tasks.sft_quickstart import CHAT_TEMPLATE as MARKED
from skyrl_train.types import Example
from tests.support.tiny import CHATML, chatml_tokenizer, tiny_tokenizer

TURNS = [
    {"role": "system", "content": "add."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+7="},
    {"role": "assistant", "content": "9"},
]
# As templates of reasoning models do: what an earlier turn thought is left out once more follows.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}(thought){% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = template
    return tokenizer


def trained(tokenizer: PreTrainedTokenizerFast, messages: list[Any], turns: str = "all", **kwargs: Any) -> list[str]:
    """The text of each unbroken run of trained tokens, "." between them."""
    ids, mask = Conversations(ChatTemplate(tokenizer, kwargs), tokenizer.eos_token_id, turns).tokens(messages)
    assert len(ids) == len(mask)
    runs = "".join(tokenizer.decode([token]) if on else "\0" for token, on in zip(ids, mask, strict=True))
    return [run for run in runs.split("\0") if run]


def load(path: Path | str, tokenizer: PreTrainedTokenizerFast | None = None, **changes: Any) -> LoadedExamples:
    settings: dict[str, Any] = {
        "vocab_size": 66,
        "max_length": 100,
        "truncate": False,
        "assistant_turns": "all",
        "chat_template_kwargs": {},
    }
    return load_examples([str(path)], tokenizer=tokenizer or chatml_tokenizer(), **{**settings, **changes})


def rows(folder: Path, *values: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


# ---- conversations


def test_the_assistants_words_and_their_end_are_trained_and_nothing_else():
    assert trained(chatml_tokenizer(), TURNS) == ["2<|im_end|>", "9<|im_end|>"]
    assert trained(chatml_tokenizer(), TURNS, "last") == ["9<|im_end|>"]


def test_text_after_the_last_answer_is_left_out():
    tokenizer = chatml_tokenizer()
    conversations = Conversations(ChatTemplate(tokenizer, {}), tokenizer.eos_token_id, "all")
    assert conversations.tokens(TURNS[:4]) == conversations.tokens(TURNS[:3])


def test_a_template_that_marks_the_assistant_is_believed():
    tokenizer = with_template(tiny_tokenizer(), MARKED)
    assert trained(tokenizer, TURNS) == ["2<eos>", "9<eos>"]
    assert trained(tokenizer, TURNS, "last") == ["9<eos>"]
    assert ChatTemplate(tokenizer, {}).marks_assistant and not ChatTemplate(tiny_tokenizer(), {}).marks_assistant


def test_marked_tokens_are_those_that_transformers_marks():
    tokenizer = with_template(tiny_tokenizer(), MARKED)
    expected = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = ChatTemplate(tokenizer, {}).marked_tokens(TURNS)
    assert ids == expected["input_ids"] and [int(on) for on in mask] == expected["assistant_masks"]


def test_training_sees_the_tokens_that_the_model_will_be_asked_with():
    tokenizer = chatml_tokenizer()
    chat = ChatTemplate(tokenizer, {})
    ids, mask = Conversations(chat, tokenizer.eos_token_id, "last").tokens(TURNS)
    assert ids[: mask.index(True)] == chat.prompt_ids(TURNS[:4])


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_cure_and_the_last_turn_still_works():
    tokenizer = with_template(chatml_tokenizer(), FORGETFUL)
    with pytest.raises(
        ValueError, match="renders the conversation up to message 2 differently when.*assistant_turns=last"
    ):
        trained(tokenizer, TURNS)
    assert trained(tokenizer, TURNS, "last") == ["(thought)9<|im_end|>"]


def test_a_tokenizer_that_merges_a_header_with_the_words_behind_it_is_refused():
    from tokenizers import Tokenizer, models

    vocabulary = {"<unk>": 0, "a": 1, ":": 2, "x": 3, ":x": 4, "u": 5, "y": 6}
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [(":", "x")], unk_token="<unk>")), unk_token="<unk>"
    )
    merging.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    ask = {"role": "user", "content": "y"}
    assert trained(merging, [ask, {"role": "assistant", "content": "y"}]) == ["y"]
    with pytest.raises(ValueError, match="merges the end of the prompt that asks for message 1 with what follows"):
        trained(merging, [ask, {"role": "assistant", "content": "x"}])


@pytest.mark.parametrize("row", [{"messages": TURNS[1:3]}, {"prompt": TURNS[1:2], "response": "2"}])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_the_last_turn_is_not_refused_with_a_remedy_that_applies_already(turns: str, row: dict[str, Any]):
    tokenizer = with_template(chatml_tokenizer(), CHATML.replace("assistant", "model"))
    with pytest.raises(ValueError, match=r"asks for message 1 differently.* separated\. Mark the turns with") as error:
        ExampleReader(tokenizer, turns, {}, 100).tokens(row)
    assert "data.assistant_turns" not in str(error.value)


def test_a_conversation_that_begins_with_the_assistant_trains_its_last_turn_alone():
    with pytest.raises(
        ValueError, match=r"message 0 is the assistant's: no prompt .* or set data\.assistant_turns=last"
    ):
        trained(chatml_tokenizer(), TURNS[2:])
    assert trained(chatml_tokenizer(), TURNS[2:], "last") == ["9<|im_end|>"]
    assert trained(chatml_tokenizer(), [TURNS[0], *TURNS[2:]]) == ["2<|im_end|>", "9<|im_end|>"]
    with pytest.raises(ValueError, match=r"message 0 is the assistant's: no prompt .* or drop the row"):
        trained(chatml_tokenizer(), TURNS[2:3], "last")


def test_variables_of_the_template_reach_it():
    tokenizer = with_template(chatml_tokenizer(), CHATML.replace("{{ m['content'] }}", "{{ m['content'] + tail }}"))
    assert trained(tokenizer, TURNS[:3], tail="z") == ["2z<|im_end|>"]


def test_a_template_that_asks_otherwise_than_it_writes_is_refused():
    tokenizer = with_template(chatml_tokenizer(), CHATML.replace("assistant", "model"))
    with pytest.raises(
        ValueError, match="renders the prompt that asks for message 2 differently when more turns follow"
    ):
        trained(tokenizer, TURNS)


# ---- rows


def test_all_formats_of_a_row_give_the_same_example(tmp_path: Path):
    tokenizer = chatml_tokenizer()
    loaded = load(rows(tmp_path, {"messages": TURNS[1:3]}))
    (example,) = loaded.examples
    ids, mask = example.token_ids.tolist(), example.loss_mask.tolist()
    labels = [token if on else -100 for token, on in zip(ids, mask, strict=True)]
    others = rows(
        tmp_path,
        {"prompt": TURNS[1:2], "response": "2"},
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "loss_mask": [int(on) for on in mask], "attention_mask": [1] * len(ids)},
    )
    for other in load(others).examples:
        assert torch.equal(other.token_ids, example.token_ids[: len(other.token_ids)])
        assert torch.equal(other.loss_mask, example.loss_mask[: len(other.loss_mask)])
    text = tokenizer.decode(ids)
    (plain,) = load(rows(tmp_path, {"prompt": text[: text.index("2<")], "response": "2"})).examples
    assert plain.token_ids.tolist() == ids[: mask.index(True) + 2] and plain.loss_mask.sum() == 2
    assert loaded.num_ended == 1


def test_parquet_and_json_are_read_like_json_lines(tmp_path: Path):
    values = [{"messages": TURNS[1:3]}, {"messages": TURNS}]
    expected = load(rows(tmp_path, *values)).examples
    datasets.Dataset.from_list(values).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(values))
    for name in ("rows.parquet", "rows.json"):
        for one, other in zip(load(tmp_path / name).examples, expected, strict=True):
            assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.loss_mask, other.loss_mask)


def test_long_rows_are_dropped_or_truncated_and_counted(tmp_path: Path):
    short, long = {"messages": TURNS[1:3]}, {"messages": TURNS}
    late = {"input_ids": [5] * 60, "loss_mask": [0] * 59 + [1]}
    path = rows(tmp_path, short, long, late)
    length = len(load(rows(tmp_path, short)).examples[0].token_ids)
    rows(tmp_path, short, long, late)
    dropped = load(path, max_length=length)
    assert (len(dropped.examples), dropped.num_dropped, dropped.num_truncated) == (1, 2, 0)
    cut = load(path, max_length=50, truncate=True)
    assert (len(cut.examples), cut.num_dropped, cut.num_truncated) == (2, 1, 1)
    assert len(cut.examples[1].token_ids) == 50 and cut.examples[1].loss_mask.any()


def test_the_first_token_is_never_trained(tmp_path: Path):
    (example,) = load(rows(tmp_path, {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]})).examples
    assert example.loss_mask.tolist() == [False, True, True]


BAD_ROWS: list[tuple[Any, str]] = [
    ({"messages": TURNS[:2]}, "no message has the role assistant: there is nothing to train on"),
    ({"messages": "hello"}, "invalid `messages`: expected a list of chat messages, got str"),
    ({"messages": [{"role": "assistent", "content": "x"}]}, "message 0 has role 'assistent': it must be one of"),
    ({"text": "x"}, r"the columns are text: a row needs `messages`, or `prompt` and `response`, or "),
    ({"prompt": "x"}, "the columns are prompt: a row needs"),
    ({"prompt": "x", "response": 3}, "`response` must be text, got int"),
    ({"prompt": 3, "response": "x"}, "invalid `prompt`: expected text or a list of chat messages"),
    ({"input_ids": [1, 2]}, "needs either `labels` or `loss_mask`"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "`input_ids` has 2 entries and `loss_mask` 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "`loss_mask` contains 2: it must be 1 for trained tokens"),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "a label is the token of its own position, not of the next"),
    ({"input_ids": ["a"], "labels": [1]}, "`input_ids` must be a list of whole numbers"),
    ({"input_ids": [1, 99], "loss_mask": [0, 1]}, "token 99 is outside the model's vocabulary of 66"),
    ({"input_ids": [1, 2], "loss_mask": [1, 0]}, "no token would be trained"),
    ({"input_ids": [], "loss_mask": []}, "no token would be trained"),
    ([1, 2], "a row must be a JSON object, got list"),
]


@pytest.mark.parametrize(("row", "expected"), BAD_ROWS, ids=[expected[:30] for _, expected in BAD_ROWS])
def test_a_bad_row_names_its_file_and_line_and_the_fault(tmp_path: Path, row: Any, expected: str):
    path = rows(tmp_path, {"messages": TURNS}, row)
    with pytest.raises(ValueError, match=rf"rows.jsonl, line 2: .*{expected}"):
        load(path)


LONG = "1" * 1_000_001


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*TURNS, {"role": "user", "content": LONG}, {"role": "assistant", "content": "2"}]},
        {"messages": [*TURNS[:-1], {"role": "assistant", "content": LONG}]},
        {"prompt": LONG, "response": "2"},
        {"prompt": "1+1=", "response": LONG},
    ],
    ids=["asked", "answered", "prompt", "response"],
)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_a_row_of_too_many_characters_is_dropped_without_being_tokenised(
    row: Any, truncate: bool, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenise = PreTrainedTokenizerFast._encode_plus

    def checked(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(text) < len(LONG)
        return tokenise(self, text, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", checked)
    path = rows(tmp_path, {"messages": TURNS}, row)
    loaded = load(path, with_template(chatml_tokenizer(), template), truncate=truncate)
    assert (len(loaded.examples), loaded.num_dropped, loaded.num_truncated) == (1, 1, 0)


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_true_and_false_are_no_tokens(tmp_path: Path, column: str):
    row = {"input_ids": [0, 1], "labels": [0, 1], column: [False, True]}
    with pytest.raises(ValueError, match=f"line 1: `{column}` must be a list of whole numbers, not of true and false"):
        load(rows(tmp_path, row))


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_half_of_a_surrogate_pair_is_named(column: str):
    row = {"prompt": "1+1=", "response": "2", column: "ab\ud800"}
    with pytest.raises(ValueError, match=f"`{column}` has '.ud800' at character 2, half of a surrogate pair"):
        ExampleReader(chatml_tokenizer(), "all", {}, 100).tokens(row)


def test_a_conversation_without_a_chat_template_says_what_to_do(tmp_path: Path):
    bare = with_template(tiny_tokenizer(), "")
    with pytest.raises(ValueError, match="line 1: the tokenizer of .* has no chat template"):
        load(rows(tmp_path, {"messages": TURNS}), bare)
    assert load(rows(tmp_path, {"prompt": "1+1=", "response": "2"}), bare).examples


def test_no_row_left_is_an_error_with_the_key_to_change(tmp_path: Path):
    with pytest.raises(ValueError, match="data.max_length is 3: the shortest row has .*too_long"):
        load(rows(tmp_path, {"messages": TURNS}), max_length=3)
    with pytest.raises(ValueError, match="data.max_length is 3: no row has a trained token among its first"):
        load(rows(tmp_path, {"messages": TURNS}), max_length=3, truncate=True)
    with pytest.raises(ValueError, match="rows.jsonl is empty"):
        load(rows(tmp_path))


# ---- batches


def test_every_trained_token_weighs_the_same_on_every_rank():
    sizes = [30, 4, 9, 3, 17]
    examples = [
        Example(torch.arange(size), torch.arange(size) >= size - trained)
        for size, trained in zip(sizes, [1, 3, 8, 2, 16], strict=True)
    ]
    shards = split(build_examples(examples), MicroBatchLimits(dp_size=2, max_tokens=40, max_sample_tokens=100))
    assert sum(len(shard.sample_ids) for shard in shards) == 5
    for shard in shards:
        (weights,) = shard.loss_weights.values()
        torch.testing.assert_close(weights, shard.loss_mask / 30)
    assert sum(int(shard.loss_mask.sum()) for shard in shards) == 30
    assert build_examples(examples).cu_seqlens.tolist() == [0, 30, 34, 43, 46, 63]


# ---- tokens of texts


def sentencepiece() -> PreTrainedTokenizerFast:
    """With a space before a text, as Llama 2 has, and what begins and ends a sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(["2+2=4 abc <result> 5"] * 5, trainers.BpeTrainer(vocab_size=60, special_tokens=special))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>"))]
    )
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.parametrize(
    ("prompt", "response"), [("2+2=", "4"), ("<s>2+2=", "4</s>"), ("<s>2+2=", "4"), ("2+2=", "4</s>")]
)
def test_a_response_follows_its_prompt_as_in_one_text_which_begins_and_ends_once(prompt: str, response: str):
    tokenizer = sentencepiece()
    ids, mask = ExampleReader(tokenizer, "all", {}, 100).tokens({"prompt": prompt, "response": response})
    assert tokenizer.decode(ids).replace("<s> ", "<s>") == "<s>2+2=4</s>"
    assert tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if is_trained]) == "4</s>"


def test_text_between_the_turns_of_one_message_gets_no_space():
    tokenizer = sentencepiece()
    assert (
        tokenizer.decode(tokenizer.encode("abc")[1:-1] + list(ChatTemplate(tokenizer, {}).encode_after("5"))) == "abc5"
    )


def test_padding_of_given_tokens_is_left_out():
    reader = ExampleReader(chatml_tokenizer(), "all", {}, 100)
    row = {
        "input_ids": [0, 0, 5, 6, 7, 0],
        "labels": [-100, -100, -100, 6, 7, -100],
        "attention_mask": [0, 0, 1, 1, 1, 0],
    }
    assert reader.tokens(row) == ([5, 6, 7], [False, True, True])
    with pytest.raises(ValueError, match="6 entries and `attention_mask` 2"):
        reader.tokens(row | {"attention_mask": [1, 1]})


def test_a_turn_ends_with_its_end_token_also_if_the_tokenizer_has_no_name_for_it():
    source = chatml_tokenizer()
    unnamed = PreTrainedTokenizerFast(
        tokenizer_object=source.backend_tokenizer, eos_token="~", chat_template=source.chat_template
    )
    end = unnamed.convert_tokens_to_ids("<|im_end|>")
    assert end not in unnamed.all_special_ids and end in ChatTemplate(unnamed, {}).special_ids
    assert trained(unnamed, TURNS) == ["2<|im_end|>", "9<|im_end|>"]


@pytest.mark.parametrize(
    ("marked", "complete", "cut", "empty"),
    [
        ("{{ m.content }}<|im_end|>\n{% endgeneration %}", "9<|im_end|>\n", "9", ""),
        ("{{ m.content }}<|im_end|>{% endgeneration %}\n", "9<|im_end|>", "9", ""),
        ("{{ m.content }}{% endgeneration %}<|im_end|>\n", "9", "9", None),
    ],
)
def test_a_turn_that_was_cut_off_is_trained_without_its_end(marked: str, complete: str, cut: str, empty: str | None):
    tokenizer = with_template(
        chatml_tokenizer(),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        + marked
        + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
    )
    conversations = Conversations(ChatTemplate(tokenizer, {}), tokenizer.eos_token_id, "all")

    def last_of(messages: list[dict[str, str]], is_cut: bool) -> str:
        ids, mask = conversations.tokens(messages, is_cut)
        before = sum(conversations.tokens(messages[:-2])[1])
        trained_ids = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
        return tokenizer.decode(trained_ids[before:])

    assert last_of(TURNS, False) == complete and last_of(TURNS, True) == cut
    nothing = [*TURNS[:-1], {"role": "assistant", "content": ""}]
    assert last_of(nothing, True) == ("" if empty is None else empty)


def test_an_empty_last_turn_trains_no_earlier_one():
    marks = with_template(
        chatml_tokenizer(),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}",
    )
    assert trained(marks, TURNS, "last") == ["9"]
    assert trained(marks, [*TURNS[:-1], {"role": "assistant", "content": ""}], "last") == []


def test_a_last_turn_that_a_template_marks_in_pieces_is_trained_whole():
    """Such as its reasoning and its answer, with unmarked text between them."""
    marks = with_template(
        chatml_tokenizer(),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content[:1] }}{% endgeneration %}<|im_end|>{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}",
    )
    assert trained(marks, TURNS[:3], "last") == trained(marks, TURNS[:3], "all") == ["2", "2"]
    assert trained(marks, TURNS, "all") == ["2", "2", "9", "9"] and trained(marks, TURNS, "last") == ["9", "9"]
