import pytest

from skyrl_train.data.chat import ChatTemplate
from tests.support.tiny import CHATML, chatml_tokenizer, tiny_tokenizer

USER = {"role": "user", "content": "guess:"}
OBSERVATION = {"role": "user", "content": "higher"}

LLAMA_3 = (
    "<bos>{% for m in messages %}<|im_start|>{{ m['role'] }}>\n\n{{ m['content'] | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant>\n\n{% endif %}"
)
MISTRAL = (
    "<bos>{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[inst] {{ m['content'] }} [/inst]{% else %} {{ m['content'] }}<eos>{% endif %}"
    "{% endfor %}"
)
# Shows the thoughts of the last turn only, as Qwen3's does, and begins with a default system message.
THINKING = (
    "<|im_start|>system\nbe kind<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not thoughts %}<think></think>{% endif %}{% endif %}"
)
CONCATENATION = tiny_tokenizer().chat_template


def tokenizer_with(template):
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs)


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, MISTRAL, CONCATENATION])
@pytest.mark.parametrize(
    "observations", [[OBSERVATION], [{"role": "user", "content": "zqxj0"}], [{"role": "user", "content": "7\n"}]]
)
def test_prompt_answer_and_reply_equal_the_template_over_the_whole_conversation(template, observations):
    tokenizer = tokenizer_with(template)
    chat = ChatTemplate(tokenizer, {})
    answer = {"role": "assistant", "content": "50"}
    written = tokenizer.encode(" 50" if template == MISTRAL else "50", add_special_tokens=False)
    ids = chat.prompt_ids([USER]) + written + chat.reply_ids(written, observations)
    assert ids == rendered(tokenizer, [USER, answer, *observations])


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA_3, "<eos>"), (MISTRAL, "<eos>")])
def test_end_of_turn_token_that_the_policy_sampled_is_not_repeated(template, end):
    tokenizer = tokenizer_with(template)
    chat = ChatTemplate(tokenizer, {})
    cut_off, ended = tokenizer.encode("50"), tokenizer.encode("50" + end)
    assert cut_off + chat.reply_ids(cut_off, [OBSERVATION]) == ended + chat.reply_ids(ended, [OBSERVATION])
    assert chat.reply_ids(cut_off, [OBSERVATION])[0] == ended[-1]


def test_stop_string_that_is_the_whole_closing_of_a_turn_is_not_repeated():
    tokenizer = tokenizer_with("{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};\n{% endfor %}")
    chat = ChatTemplate(tokenizer, {})
    for text in ("50", "50;", "50;\n"):
        written = tokenizer.encode(text)
        assert tokenizer.decode(written + chat.reply_ids(written, [OBSERVATION])) == "50;\nuser:higher;\n"


def test_letter_that_the_answer_ends_with_and_the_reply_begins_with_is_kept():
    tokenizer = tokenizer_with(CONCATENATION)
    written = tokenizer.encode("oh")
    reply = ChatTemplate(tokenizer, {}).reply_ids(written, [OBSERVATION])
    assert tokenizer.decode(written + reply) == "ohhigher"


def test_thoughts_that_the_template_hides_in_earlier_turns_do_not_disturb_the_reply():
    tokenizer = tokenizer_with(THINKING)
    for kwargs, header in (({"thoughts": True}, ""), ({}, "<think></think>")):
        written = tokenizer.encode("50<|im_end|>")
        reply = ChatTemplate(tokenizer, kwargs).reply_ids(written, [OBSERVATION])
        expected = f"\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n{header}"
        assert reply == tokenizer.encode(expected)


def test_turn_without_observations_is_closed_and_the_next_one_opened():
    tokenizer = tokenizer_with(CHATML)
    reply = ChatTemplate(tokenizer, {}).reply_ids(tokenizer.encode("50"), [])
    assert tokenizer.decode(reply) == "<|im_end|>\n<|im_start|>assistant\n"


def test_anchor_that_merges_with_what_follows_is_not_used():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = "zqxj0)higer7u"
    vocabulary = {c: i for i, c in enumerate(characters)} | {"07": len(characters)}
    merging = Tokenizer(models.BPE(vocabulary, [("0", "7")]))
    merging.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, chat_template=CONCATENATION)
    reply = ChatTemplate(tokenizer, {}).reply_ids([], [{"role": "user", "content": "7"}])
    assert reply == [vocabulary["7"]]


def test_numbers_of_tokens_of_many_texts_are_those_of_each():
    chat = ChatTemplate(tokenizer_with(CHATML), {})
    conversations = [[{"role": "user", "content": "x" * (n % 40)}] for n in range(2100)]
    assert chat.num_tokens([*map(chat.render, conversations)]) == [len(chat.prompt_ids(c)) for c in conversations]


def test_prompt_ids_are_the_callers_own():
    chat = ChatTemplate(tokenizer_with(CHATML), {})
    chat.prompt_ids([USER]).append(99)
    chat.reply_ids([], [OBSERVATION]).append(99)
    assert 99 not in chat.prompt_ids([USER]) + chat.reply_ids([], [OBSERVATION])


def test_messages_that_the_template_refuses_are_an_error_with_its_reason():
    with pytest.raises(ValueError, match="chat template rejected .*: roles must alternate"):
        ChatTemplate(tokenizer_with(MISTRAL), {}).prompt_ids([USER, USER])


def test_template_that_rewrites_answers_is_refused_for_turns():
    tokenizer = tokenizer_with("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    with pytest.raises(ValueError, match="changes the assistant's text"):
        ChatTemplate(tokenizer, {}).reply_ids([5], [OBSERVATION])
