"""A conversation encoded once has the tokens, turns and errors of one whose every beginning is encoded alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.conversation import Conversations, EncodedText

CORPUS = [
    "what is 12 + 7? it is 19, isn't it?",
    "user assistant maybe yes no  \n\n think: 100 200",
    "naïve, ok 你好 🙂",
] * 3
# Of Qwen's and Llama 3's tokenizers: what it finds depends on what follows (`(?!\S)`).
LOOKS_AHEAD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<s>' }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LOOKS_AHEAD), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return tokenizer


def llama2() -> Tokenizer:
    """A space before every text, also behind a special token; "maybe yes" is looked for behind one too."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    tokenizer.add_tokens([AddedToken("maybe yes", normalized=True)])
    return tokenizer


def sentencepiece(prepend: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_pieces() -> Tokenizer:
    """Its text is changed before it is split, and so is the text in which "maybe yes" is looked for."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    tokenizer.add_tokens([AddedToken("maybe yes", normalized=True)])
    return tokenizer


def with_chat(tokenizer: Tokenizer, template: str, eos: str, *special: AddedToken | str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    return fast


TOKENIZERS: dict[str, PreTrainedTokenizerFast] = {
    "byte level, ChatML": with_chat(byte_level(), CHATML, "<|im_end|>", "<|im_start|>"),
    "byte level, marks that swallow spaces": with_chat(
        byte_level(),
        CHATML,
        "<|im_end|>",
        "<|im_start|>",
        AddedToken("<pause>", lstrip=True, special=True, normalized=False),
        AddedToken("<think>", rstrip=True, special=True, normalized=False),
    ),
    "byte level, no marks": with_chat(byte_level(), PLAIN, "<|never|>"),
    "llama 2, INST": with_chat(llama2(), INST, "</s>", "<s>"),
    "unigram, first": with_chat(sentencepiece("first"), GEMMA, "<end_of_turn>", "<start_of_turn>", "<s>"),
    "unigram, always": with_chat(sentencepiece("always"), INST, "</s>", "<s>"),
    "word pieces, ChatML": with_chat(word_pieces(), CHATML, "<|im_end|>", "<|im_start|>"),
    "word pieces, no marks": with_chat(word_pieces(), PLAIN, "<|never|>"),
}
PIECES = [
    "12", "7", " ", "  ", "\n", "\n\n", "\t", "'", "'s", "isn't", "maybe", "yes", "maybe yes", "?", "!!", "é",
    "e\u0301", "你好", "🙂",
    "<", "|", "<|im_end|>", "<|im_start|>", "<|im_", "<think>", "<pause>", "<s>", "</s>", "<end_of_turn>", "[/INST]",
    "### ", "\u2581", "\u00a0",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


def as_messages(texts: list[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def lengths_alone(tokenizer: PreTrainedTokenizerFast, text: str, lengths: list[int]) -> list[int | None]:
    """`num_tokens` with each beginning encoded whole."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    beginnings = [tokenizer.encode(text[:length], add_special_tokens=False) for length in lengths]
    return [len(own) if ids[: len(own)] == own else None for own in beginnings]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(TEXT, min_size=2, max_size=5))
@example(["a ", " 1  1", "x", " \n y"])
@example(["maybe", " yes", "maybe yes", "<|im_end|> "])
def test_every_beginning_has_the_tokens_that_it_has_alone(name: str, texts: list[str]):
    tokenizer = TOKENIZERS[name]
    text = ChatTemplate(tokenizer, {}).render(as_messages(texts), add_generation_prompt=False)
    encoded = EncodedText(tokenizer, text)
    lengths = list(range(len(text) + 1))
    assert encoded.ids == tokenizer.encode(text, add_special_tokens=False)
    assert [encoded.num_tokens(length) for length in lengths] == lengths_alone(tokenizer, text, lengths)


def trained(tokenizer: Any, messages: list[Any]) -> tuple[list[int], list[bool]] | str:
    try:
        return Conversations(ChatTemplate(tokenizer, {}), tokenizer.eos_token_id, "all").tokens(messages)
    except ValueError as error:
        return str(error)


class Unmarked:
    """A tokenizer that cannot say where its tokens begin, as those written in Python."""

    is_fast = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_turns_and_errors_are_those_of_a_tokenizer_that_cannot_say_where_its_tokens_begin(name: str):
    conversations = [as_messages([*PIECES[first : first + 3], "maybe"]) for first in range(len(PIECES) - 3)]
    results = [trained(TOKENIZERS[name], messages) for messages in conversations]
    assert results == [trained(Unmarked(TOKENIZERS[name]), messages) for messages in conversations]
    assert any(not isinstance(result, str) and sum(result[1]) > 1 for result in results)


def test_a_beginning_that_ends_between_tokens_may_still_be_encoded_otherwise_alone():
    """Where the text alone is asked, its two spaces are one token; before a digit they are two."""
    tokenizer = TOKENIZERS["byte level, no marks"]
    text = "no  1"
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == tokenizer.encode("no ", add_special_tokens=False)
    assert EncodedText(tokenizer, text).num_tokens(3) == 2 and EncodedText(tokenizer, text).num_tokens(4) is None


def test_a_long_conversation_takes_as_many_calls_as_turns_of_a_turns_length():
    tokenizer = TOKENIZERS["byte level, ChatML"]
    messages = as_messages(["what is 12 + 7? " * 40] * 60)
    lengths: list[int] = []

    class Counted(Unmarked):
        is_fast = True

        def __call__(self, text: str, **arguments: Any) -> Any:
            lengths.append(len(text))
            return self._tokenizer(text, **arguments)

        def encode(self, text: str, **arguments: Any) -> list[int]:
            lengths.append(len(text))
            return self._tokenizer.encode(text, **arguments)

    counted: Any = Counted(tokenizer)
    assert trained(counted, messages) == trained(Unmarked(tokenizer), messages)
    whole = len(ChatTemplate(tokenizer, {}).render(messages))
    assert sum(lengths) < 2.5 * whole, "once whole, and once in pieces"
