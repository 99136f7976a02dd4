"""Chat templates of the large families' form, with tokenizers like theirs."""

import pytest

from tests.support.realistic import FAMILIES, realistic_tokenizer

QUESTION = [{"role": "user", "content": " How many are 1234 + 1?\n"}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": "1235"}, {"role": "user", "content": "twice: ä, 二"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_tokens_for_any_text_and_no_more_than_asked_for(family):
    tokenizer = realistic_tokenizer(family)
    text = tokenizer.apply_chat_template(ANSWERED, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert 7900 < max(tokenizer.get_vocab().values()) < 8000
    assert len(ids) < len(text) / 2  # words are tokens


def test_two_tokenizers_of_a_family_are_equal():
    first, second = (realistic_tokenizer("qwen3", 600) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
