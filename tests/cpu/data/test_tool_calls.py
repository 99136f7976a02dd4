"""Tool calls of messages are in the text that the chat template renders, or refused."""

import asyncio
import json
import logging

import datasets
import pytest

from skyrl_train.data.chat import ChatTemplate, check_messages
from skyrl_train.data.hints import Hints, check_template, hint_of_template
from skyrl_train.data.prompts import load_prompts
from skyrl_train.data.rows import read_rows
from skyrl_train.data.sft import ExampleReader
from skyrl_train.types import Generation, Group, Prompt
from tests.support.realistic import realistic_tokenizer
from tests.support.samples import sample
from tests.support.scripted import PARAMS, Script, sampler

FUNCTION = "call.function.name + ':' + call.function.arguments"
BY_NONE = (  # DeepSeek-V3's
    "{% for m in messages %}{% if m.content is none %}<|im_start|>{% for call in m.tool_calls %}"
    f"{{{{ {FUNCTION} }}}}{{% endfor %}}<|im_end|>{{% else %}}{{{{ m.role }}}} {{{{ m.content }}}}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
AS_TEXT = f"{{% for m in messages %}}{{{{ m.content + '|' }}}}{{% for call in m.tool_calls %}}{{{{ {FUNCTION} }}}}"
AS_TEXT += "{% endfor %}{% endfor %}"
BY_NONE_AS_OBJECT = BY_NONE.replace("call.function.arguments", "(call.function.arguments | tojson)")
OBJECT = {"city": "Zürich", "days": 2}
WRITTEN = json.dumps(OBJECT, ensure_ascii=False)
QUESTION = {"role": "user", "content": "Say weather."}


def tokenizer_with(template):
    tokenizer = realistic_tokenizer("chatml")
    tokenizer.chat_template = template
    return tokenizer


def called(arguments, **content):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return check_messages([QUESTION, {"role": "assistant", **content, "tool_calls": [call]}])


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", [OBJECT, WRITTEN])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (BY_NONE, "user Say weather.<|im_end|><|im_start|>weather:{}<|im_end|>"),
        (BY_NONE_AS_OBJECT, "user Say weather.<|im_end|><|im_start|>weather:{}<|im_end|>"),
        (AS_TEXT, "Say weather.||weather:{}"),
    ],
)
def test_calls_are_rendered_in_the_form_that_the_template_reads(template, expected, arguments, content):
    text = ChatTemplate(tokenizer_with(template), {}).render(called(arguments, **content), False)
    assert text == expected.format(WRITTEN)


def test_fine_tuning_trains_the_calls_of_a_message_without_content():
    marked = BY_NONE.replace("{% for call", "{% generation %}{% for call").replace(
        "{% endfor %}<|im_end|>", "{% endfor %}<|im_end|>{% endgeneration %}"
    )
    for template in (BY_NONE, marked):
        tokenizer = tokenizer_with(template)
        ids, mask = ExampleReader(tokenizer, "all", {}, 4096).tokens({"messages": called(WRITTEN)})
        trained = [token for token, on in zip(ids, mask, strict=True) if on]
        assert tokenizer.decode(trained) == f"weather:{WRITTEN}<|im_end|>"


@pytest.mark.parametrize("content", [{}, {"content": "One moment."}])
def test_calls_that_the_template_leaves_out_are_refused_also_if_the_text_names_the_function(content):
    chat = ChatTemplate(realistic_tokenizer("chatml"), {})
    with pytest.raises(ValueError, match=r"does not render `tool_calls` of the messages \(weather\). Put a chat_templ"):
        chat.render(called(OBJECT, **content))


def test_a_template_that_needs_the_calls_of_results_renders_them():
    strict = AS_TEXT + "{% if not messages[1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    assert ChatTemplate(tokenizer_with(strict), {}).render(called(OBJECT)).endswith(f"weather:{WRITTEN}")
    messages = [QUESTION, {"role": "assistant", "content": ""}]
    with pytest.raises(ValueError, match="rejected .*: no call"):
        ChatTemplate(tokenizer_with(strict), {}).render(messages)


# ---- the tools of a row

LISTS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<|im_end|>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_start|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
MARKS_TOO = LISTS_TOOLS.replace(
    "{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
)
TURNS = [QUESTION, {"role": "assistant", "content": "It rains."}]


def tool(name, **fields):
    properties = {key: {"type": value} for key, value in fields.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


WEATHER, CLOCK = [tool("weather", city="string")], [tool("clock", zone="string", hour="integer")]


@pytest.mark.parametrize("template", [LISTS_TOOLS, MARKS_TOO])
def test_fine_tuning_lists_the_tools_of_each_row_as_transformers_does(template, caplog):
    tokenizer = tokenizer_with(template)
    reader = ExampleReader(tokenizer, "all", {"tools": CLOCK}, 4096)
    answer = {"prompt": TURNS[:1], "response": TURNS[1]["content"]}
    for given, tools in [(WEATHER, WEATHER), (json.dumps(CLOCK), CLOCK), (None, CLOCK), ([], CLOCK), (" ", CLOCK)]:
        for row in ({"messages": TURNS}, answer):
            ids, mask = reader.tokens({**row, "tools": given})
            expected = tokenizer.apply_chat_template(TURNS, tools=tools, tokenize=False)
            assert tokenizer.decode(ids) == expected
            trained = [token for token, on in zip(ids, mask, strict=True) if on]
            assert tokenizer.decode(trained) == "It rains.<|im_end|>"
    assert not caplog.records


def test_tools_of_a_parquet_file_have_no_fields_of_other_rows(tmp_path):
    rows = [{"messages": TURNS, "tools": tools, "tests": [{"function": "f", "x": None}]} for tools in (WEATHER, CLOCK)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    assert [row for _, row in read_rows([str(tmp_path / "rows.parquet")])] == rows


def test_a_template_without_tools_is_named_once(caplog):
    reader = ExampleReader(realistic_tokenizer("chatml"), "all", {}, 4096)
    for tools in ("[]", " ", WEATHER, WEATHER):  # the first two list none
        reader.tokens({"messages": TURNS, "tools": tools})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "leaves out the rows' `tools`" in record.message


@pytest.mark.parametrize(("given", "listed"), [(WEATHER, WEATHER), (json.dumps(CLOCK), CLOCK), (None, WEATHER)])
def test_rollouts_and_the_limit_of_prompts_list_the_tools_of_each_row_as_transformers_does(given, listed, tmp_path):
    tokenizer = tokenizer_with(LISTS_TOOLS)
    expected = tokenizer.apply_chat_template([QUESTION], tools=listed, add_generation_prompt=True, return_dict=False)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [QUESTION], "tools": given, "reward_spec": {"ground_truth": "7"}}))
    options = {
        "tokenizer": tokenizer, "default_env_class": "addition", "chat_template_kwargs": {"tools": WEATHER},
    }  # fmt: skip
    (row,) = load_prompts([str(file)], max_prompt_length=len(expected), **options).prompts
    assert row.extras["tools"] == given
    with pytest.raises(ValueError, match=f"the shortest prompt has {len(expected)}"):
        load_prompts([str(file)], max_prompt_length=len(expected) - 1, **options)
    script = Script(tokenizer, "7")
    with sampler(tokenizer, script, chat_template_kwargs={"tools": WEATHER}) as playing:
        asyncio.run(playing.sample(row, PARAMS))
    assert script.inputs[0] == expected


TALKS = LISTS_TOOLS.replace("{% for m in", "{{ 'aloud ' if mood is defined and mood == 'loud' else '' }}{% for m in", 1)


@pytest.mark.parametrize(
    "given", [{"mood": "loud", "other": None}, '{"mood": "loud"}', {"mood": "calm"}, {}, None, " "]
)
def test_variables_of_a_row_take_the_place_of_those_of_the_configuration(given, tmp_path):
    tokenizer = tokenizer_with(TALKS)
    mood = "loud" if "loud" in str(given) or not (given and str(given).strip()) else "calm"
    options = {"mood": mood, "tools": CLOCK}
    expected = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False, **options)
    file = tmp_path / "rows.jsonl"
    row = {"prompt": [QUESTION], "chat_template_kwargs": given, "tools": CLOCK, "reward_spec": {"ground_truth": "7"}}
    file.write_text(json.dumps(row))
    loading = {
        "tokenizer": tokenizer, "default_env_class": "addition", "chat_template_kwargs": {"mood": "loud"},
    }  # fmt: skip
    (prompt,) = load_prompts([str(file)], max_prompt_length=len(expected), **loading).prompts
    with pytest.raises(ValueError, match=f"the shortest prompt has {len(expected)}"):
        load_prompts([str(file)], max_prompt_length=len(expected) - 1, **loading)
    assert ChatTemplate(tokenizer, {"mood": "loud"}).for_row(prompt.extras).prompt_ids([QUESTION]) == expected
    reader = ExampleReader(tokenizer, "all", {"mood": "loud"}, 4096)
    ids, _ = reader.tokens({"messages": TURNS, "chat_template_kwargs": given, "tools": CLOCK})
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TURNS, tokenize=False, **options)


def test_variables_of_a_parquet_file_are_those_of_their_own_row(tmp_path):
    rows = [{"messages": TURNS, "chat_template_kwargs": {name: True}} for name in ("loud", "calm")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    assert [row for _, row in read_rows([str(tmp_path / "rows.parquet")])] == rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["loud"], "must be a mapping of .*data.columns.chat_template_kwargs=null"),
        ("loud", "must be a mapping of the chat template's variables"),
        ({"chat_template": "{{ 1 }}"}, "has chat_template: a row can only set variables of the chat template"),
        ({"tokenize": True, "return_dict": False, "tools": CLOCK}, "has return_dict, tokenize, tools: "),
        ({"mood": b"x"}, "must have values of JSON"),
    ],
)
def test_variables_of_another_kind_are_refused(given, message):
    reader = ExampleReader(realistic_tokenizer("chatml"), "all", {}, 4096)
    with pytest.raises(ValueError, match=f"`chat_template_kwargs` {message}"):
        reader.tokens({"messages": TURNS, "chat_template_kwargs": given})


def test_nested_variables_of_a_row_keep_their_order():
    tokenizer = tokenizer_with("{{ form | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}")
    form = {"type": "object", "properties": {"b": 1, "a": 2}}
    rendered = ChatTemplate(tokenizer, {}).for_row({"chat_template_kwargs": {"form": form}}).render([QUESTION])
    assert rendered == tokenizer.apply_chat_template([QUESTION], tokenize=False, form=form)
    assert rendered.index('"b"') < rendered.index('"a"')


def test_the_longest_prompt_with_a_hint_is_measured_with_the_variables_of_its_row():
    tokenizer = tokenizer_with("{{ persona }}{% for m in messages %}{{ m.content }}{% endfor %}")
    talker = Prompt(
        "0", [QUESTION], "env", {"answer": "a", "chat_template_kwargs": {"persona": "kind " * 40}}, "unknown"
    )
    asker = Prompt("1", [{"role": "user", "content": "why " * 20}], "env", {"answer": "a"}, "unknown")
    chat = ChatTemplate(tokenizer, {})
    longest = check_template("Hint: {answer}", [asker, talker], chat, max_tokens=4096, max_response=8)
    assert longest > 40, "a token for each word of the row's variable"


def test_a_hint_is_in_a_prompt_with_the_tools_of_its_row():
    tokenizer = tokenizer_with(LISTS_TOOLS)
    row = Prompt("0", [QUESTION], "env", {"tools": CLOCK, "answer": "rain"}, "unknown")
    chat, template = ChatTemplate(tokenizer, {}), "{prompt} ({answer})"

    def ids(content):
        messages = [{**QUESTION, "content": content}]
        return tokenizer.apply_chat_template(messages, tools=CLOCK, add_generation_prompt=True, return_dict=False)

    answered = sample(ids("Say weather."), Generation([11], [-1.0], "", "stop", 0), 1.0)
    (hinted,) = Hints(hint_of_template(template), chat).prompts([Group(row, (answered,))])
    assert hinted.token_ids.tolist() == ids("Say weather. (rain)")
    length = check_template(template, [row], chat, max_tokens=1000, max_response=None)
    assert length == len(hinted.token_ids)


def test_a_template_without_tools_is_named_once_also_for_prompts(caplog, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps({"prompt": [QUESTION], "tools": WEATHER}) + "\n") * 2)
    options = {"tokenizer": realistic_tokenizer("chatml"), "default_env_class": "addition"}
    load_prompts([str(file)], max_prompt_length=4096, chat_template_kwargs={}, **options)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "leaves out the rows' `tools`" in record.message
    file.write_text(json.dumps({"prompt": [QUESTION], "tools": ["weather"]}))
    with pytest.raises(ValueError, match="rows.jsonl.*`tools` must be a list of .*data.columns.tools=null"):
        load_prompts([str(file)], max_prompt_length=4096, chat_template_kwargs={}, **options)


@pytest.mark.parametrize("tools", [["weather"], "weather", {"name": "weather"}, 3, '["weather"]'])
def test_a_column_of_other_tools_is_refused_with_the_key_that_removes_it(tools):
    reader = ExampleReader(tokenizer_with(LISTS_TOOLS), "all", {}, 4096)
    with pytest.raises(ValueError, match="`tools` must be a list of .*got .*(weather|3).*data.columns.tools=null"):
        reader.tokens({"messages": TURNS, "tools": tools})
    with pytest.raises(ValueError, match="`tools` must have values of JSON"):
        reader.tokens({"messages": TURNS, "tools": [{"name": b"x"}]})
