"""The yes-no-maybe task: rewards, questions, and what the model is warm-started on."""

from __future__ import annotations

import pytest

from skyrl_train.envs.registry import make_env, register_built_in
from skyrl_train.tasks.tiny import tokenizer
from skyrl_train.tasks.yes_no_maybe import question_rows


@pytest.mark.parametrize(
    ("answer", "reward"), [("maybe", 1.0), (" no\n", 0.75), ("yes", 0.5), ("may", 0.0), ("yes no", 0.0), ("", 0.0)]
)
def test_maybe_is_worth_most(answer: str, reward: float):
    register_built_in()
    env = make_env("yes_no_maybe", None, {})
    result = env.step(answer)
    assert result["reward"] == reward and result["done"]


def test_questions_fit_the_tokenizer_and_none_is_in_both_files():
    train, held_out = ([row["prompt"][0]["content"] for row in rows] for rows in question_rows())
    assert (len(train), len(held_out)) == (450, 50) and not set(train) & set(held_out)
    characters = tokenizer()
    assert not any(characters.unk_token_id in characters.encode(question) for question in (*train, *held_out))
