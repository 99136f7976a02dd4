"""The prompts that a teacher reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.hints import Hints, check_template, hint_of_template, hinted_messages
from skyrl_train.types import Generation, Group, Message, Prompt, Sample
from tests.support.realistic import realistic_tokenizer
from tests.support.samples import sample
from tests.support.tiny import chatml_tokenizer

TEMPLATE = "{prompt} ({reward_spec[ground_truth]}, {level:02d})"
CHAT = ChatTemplate(chatml_tokenizer(), {})


def prompt(question: str = "1+2=", uid: str = "7", **extras: object) -> Prompt:
    messages = [{"role": "user", "content": "0+1="}, {"role": "assistant", "content": "1"}]
    columns = {"reward_spec": {"ground_truth": "3"}, "level": 4, **extras}
    return Prompt(uid, [*messages, {"role": "user", "content": question}], "env", columns, "sums")


def answered(row: Prompt) -> Sample:
    return sample(CHAT.prompt_ids(row.messages), Generation([11, 12], [-1.0, -2.0], "", "stop", 0), 1.0)


def test_the_template_replaces_the_last_user_message_and_reads_columns():
    messages = hinted_messages(TEMPLATE, prompt())
    assert messages[:2] == prompt().messages[:2]
    assert messages[2] == {"role": "user", "content": "1+2= (3, 04)"}
    assert prompt().messages[2]["content"] == "1+2="
    braces = hinted_messages("{prompt} {{x}} {note}", prompt(note="{prompt}"))
    assert braces[2]["content"] == "1+2= {x} {prompt}", "braces in a column are text"


def test_the_teacher_reads_the_hinted_prompt_in_place_of_the_samples_own():
    first, second = prompt(), prompt("4+5=", level=1)
    groups = [Group(first, (answered(first),) * 2), Group(second, (answered(second),))]
    found = Hints(hint_of_template(TEMPLATE), CHAT).prompts(groups)
    assert [each.length for each in found] == [
        len(CHAT.prompt_ids(g.prompt.messages)) for g in groups for _ in g.samples
    ]
    texts = [CHAT.tokenizer.decode(each.token_ids) for each in found]
    assert texts[0] == texts[1] == CHAT.render(hinted_messages(TEMPLATE, first))
    assert "4+5= (3, 01)" in texts[2]


def test_a_function_sees_the_group_and_may_leave_the_prompt_of_a_sample():
    row = prompt()
    group = Group(row, (answered(row), replace(answered(row), stop_reason="length")))

    def hint(given: Group, one: Sample) -> list[Message] | None:
        assert given is group
        return None if one.stop_reason == "length" else [{"role": "system", "content": "3"}, *given.prompt.messages]

    with_hint, without = Hints(hint, CHAT).prompts([group])
    assert with_hint.length == without.length == len(without.token_ids) < len(with_hint.token_ids)
    assert torch.equal(without.token_ids, torch.tensor(CHAT.prompt_ids(row.messages)))


def test_a_sample_with_another_prompt_than_its_row_and_messages_that_are_none_are_refused():
    row = prompt()
    other = Group(row, (answered(prompt("4+5=")),))
    with pytest.raises(ValueError, match="prompt 7 does not begin with the prompt of its row"):
        Hints(hint_of_template(TEMPLATE), CHAT).prompts([other])
    wrong = Hints(lambda group, one: [{"role": "user"}], CHAT)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompt 7 with its hint: message 0 has `content` null"):
        wrong.prompts([Group(row, (answered(row),))])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt} {answer}", r"prompt 7 \(KeyError: 'answer'\). The fields are prompt, reward_spec, level, empty"),
        ("{prompt} {reward_spec[answer]}", "KeyError: 'answer'"),
        ("{prompt} {level.x}", "AttributeError"),
        ("{prompt} {empty}", "a column is null"),
        ("{prompt} {0}", "cannot be filled from prompt 7"),
    ],
)
def test_a_row_without_the_columns_of_the_template_is_named_before_the_run(template: str, message: str):
    with pytest.raises(ValueError, match=message):
        check_template(template, [prompt(empty=None)], CHAT, max_tokens=1000, max_response=None)


def test_a_hint_that_leaves_no_room_for_the_response_is_refused_before_the_run():
    rows = [prompt(), prompt("1+22222222222222222222=", "8")]
    length = len(CHAT.prompt_ids(hinted_messages(TEMPLATE, rows[1])))
    check_template(TEMPLATE, rows, CHAT, max_tokens=length + 5, max_response=5)
    check_template(TEMPLATE, rows, CHAT, max_tokens=length + 1, max_response=None)
    with pytest.raises(
        ValueError, match=rf"prompt 8 with its hint has {length} tokens and a response of up to 6 tokens"
    ):
        check_template(TEMPLATE, rows, CHAT, max_tokens=length + 5, max_response=6)
    system = replace(prompt(), messages=[{"role": "system", "content": "1"}])
    with pytest.raises(ValueError, match="prompt 7 has no user message"):
        check_template(TEMPLATE, [system], CHAT, max_tokens=1000, max_response=None)


def test_a_tool_call_without_content_counts_by_its_arguments():
    call = {"function": {"name": "add", "arguments": {"a": "1" * 99}}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = ChatTemplate(realistic_tokenizer("qwen2_5"), {})
    rows = [replace(prompt(), messages=[*prompt().messages, called]), prompt("1+2=" * 9, "8")]
    longest = chat.prompt_ids(hinted_messages(TEMPLATE, rows[0]))
    assert check_template(TEMPLATE, rows, chat, max_tokens=1000, max_response=5) == len(longest)
