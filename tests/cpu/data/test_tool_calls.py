"""Tool calls of messages are in the text that the chat template renders, or refused."""

import json

import pytest

from skyrl_train.data.chat import ChatTemplate, check_messages
from skyrl_train.data.sft import ExampleReader
from tests.support.realistic import realistic_tokenizer

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
