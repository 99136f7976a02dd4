"""Reward functions in TRL's shape: what they receive, what they return, and errors that name them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import skyrl_train.envs  # noqa: F401 (registers the built-in environments)
from skyrl_train.checks.custom import reward_problems
from skyrl_train.config import load_config
from skyrl_train.envs.registry import make_env, row_problem
from skyrl_train.faults import where

HERE = "tests.cpu.envs.test_reward_functions"
MESSAGES = [{"role": "user", "content": "1+2="}]
seen: dict[str, Any] = {}


def remembers(prompts, completions, completion_ids, **columns):
    seen.clear()
    seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
    return [0.5]


def right(completions, answer):
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


async def brief(completions, **kwargs):
    return [-len(text) for text in completions]


def not_for_this(completions, **kwargs):
    return [None]


def one_number(completions, **kwargs):
    return 1.0


def too_many(completions, **kwargs):
    return [1.0, 2.0]


def looks_up(completions, **kwargs):
    return [{}[text] for text in completions]


async def looks_up_later(completions, **kwargs):
    return [{}[text] for text in completions]


def words(completions, **kwargs):
    return ["good"]


def infinite(completions, **kwargs):
    return [float("inf")]


def play(*names: str, weights: tuple[float, ...] = (), response: str = "3", **extras: Any) -> dict[str, Any]:
    config = {"functions": [f"{HERE}:{name}" for name in names], "weights": list(weights) or [1.0] * len(names)}
    env = make_env("reward_fn", config, {"max_turns": 1, **extras})
    assert env.init(list(MESSAGES)) == (MESSAGES, {})
    env.response_ids = [7, 8]
    return env.step(response)


def test_a_text_prompt_gives_text_and_every_column_is_a_list():
    output = play("remembers", prompt="1+2=", answer="3", extra_info={"index": 4})
    assert (output["reward"], output["done"], output["observations"]) == (0.5, True, [])
    assert seen == {
        "prompts": ["1+2="], "completions": ["3"], "completion_ids": [[7, 8]], "answer": ["3"],
        "extra_info": [{"index": 4}],
    }  # fmt: skip


def test_a_prompt_of_messages_gives_messages():
    play("remembers")
    assert seen["prompts"] == [MESSAGES]
    assert seen["completions"] == [[{"role": "assistant", "content": "3"}]]


def test_several_functions_are_added_with_their_weights_and_named():
    output = play("right", "brief", "not_for_this", weights=(2.0, 0.1, 9.0), prompt="1+2=", answer="3")
    assert output["reward"] == pytest.approx(2.0 * 1.0 + 0.1 * -1)
    assert output["metadata"]["rewards"] == {"right": 1.0, "brief": -1.0}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("one_number", "one_number returned 1.0: it must return a list with one float"),
        ("too_many", "too_many returned 2 rewards for 1 completion"),
        ("words", "words returned 'good': a reward must be a float"),
        ("infinite", "infinite returned inf: a reward must be finite"),
        ("looks_up", "looks_up raised KeyError: '3'"),
        ("looks_up_later", "looks_up_later raised KeyError: '3'"),
        ("not_for_this", "not_for_this returned .None.. At least one function"),
    ],
)
def test_a_wrong_result_is_an_error_that_names_the_function(name, problem):
    with pytest.raises(ValueError, match=f"environment.reward_fn:? {HERE}:{problem}") as caught:
        play(name, prompt="1+2=")
    if "raised" in problem:
        line = inspect.getsourcelines(globals()[name])[1] + 1
        assert where(caught.value, "") == f" ({__file__}:{line})"


def test_a_missing_column_is_found_by_the_first_row():
    config = {"functions": [f"{HERE}:right"], "weights": [1.0]}
    problem = row_problem("reward_fn", config, {"prompt": "1+2=", "solution": "3"})
    assert problem is not None and "missing a required argument: 'answer'" in problem and "columns solution" in problem


def problems(*overrides: str) -> list[str]:
    return list(reward_problems(load_config(overrides)))


def test_the_keys_are_checked_and_select_the_environment():
    assert load_config([]).environment.env_class == "gsm8k"
    one = f"environment.reward_fn={HERE}:right"
    assert load_config([one]).environment.env_class == "reward_fn" and not problems(one)
    assert load_config([one]).environment.env_kwargs["reward_fn"] == {"functions": [f"{HERE}:right"], "weights": [1.0]}
    for overrides, problem in [
        ([one, "environment.env_class=addition"], "Remove one of them, or set environment.env_class=reward_fn"),
        ([one, "environment.reward_weights=[1,2]"], "has 2 weights for the 1 functions"),
        ([f"environment.reward_fn=[{HERE}:right,{HERE}:right]"], "named twice"),
        (["environment.env_class=reward_fn"], "environment.reward_fn is empty"),
        ([f"environment.reward_fn={HERE}:rigth"], "did you mean right?"),
        ([f"environment.reward_fn={HERE}:HERE"], "it is a str. Define"),
    ]:
        (found,) = problems(*overrides)
        assert problem in found


def test_weights_that_gdpo_does_not_read_are_refused():
    weighted = ["environment.env_class=reward_fn", "environment.reward_weights=[1.0,-0.1]"]
    weighted.append("environment.reward_fn=[builtins:len,builtins:abs]")
    gdpo = "trainer.algorithm.advantage_estimator=gdpo"
    assert "gdpo weighs the normalised rewards by" in " ".join(problems(*weighted, gdpo))
    assert "gdpo" not in " ".join(problems(*weighted))
    assert "gdpo" not in " ".join(problems(*weighted[::2], "environment.reward_weights=[1.0,1.0]", gdpo))
