import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import skyrl_gym
import torch
from skyrl_gym.envs.base_text_env import BaseTextEnv

import skyrl_train.envs  # noqa: F401 (registers the built-in environments)
from skyrl_train.envs.registry import aggregate_env_metrics, env_creator, make_env, register_built_in

DOCUMENT = Path(__file__).parents[3] / "docs" / "environments.md"


def extras(ground_truth, **more):
    return {"reward_spec": {"method": "rule", "ground_truth": ground_truth}, **more}


def module_with(tmp_path, monkeypatch, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(("response", "reward"), [("85", 1.0), (" 85\n", 1.0), ("085", 0.0), ("8 5", 0.0), ("", 0.0)])
def test_addition_rewards_the_exact_answer_alone(response, reward):
    output = make_env("addition", {}, extras("85")).step(response)
    assert (output["reward"], output["done"], output["observations"]) == (reward, True, [])


def play(responses, number=7, max_turns=2):
    env = make_env("guess_number", {}, extras(number, max_turns=max_turns))
    outputs = [env.step(response) for response in responses]
    assert [o["done"] for o in outputs] == [False] * (len(outputs) - 1) + [True]
    replies = [message["content"] for o in outputs for message in o["observations"]]
    return sum(o["reward"] for o in outputs), replies, env.get_metrics()["turns"]


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        (["7"], (1.0, [], 1)),
        (["5", "7"], (1.0, ["higher"], 2)),
        (["9", "7"], (1.0, ["lower"], 2)),
        (["5", "8"], (0.2, ["higher"], 2)),
        (["5", "5"], (0.0, ["higher"], 2)),
        (["9", "10"], (0.0, ["lower"], 2)),
        (["seven"], (0.0, [], 1)),
        (["5", "hm"], (0.0, ["higher"], 2)),
    ],
)
def test_guess_number_replies_once_and_rewards_the_number_or_a_heeded_hint(responses, expected):
    assert play(responses) == expected


def test_guess_number_remembers_every_hint_when_it_has_more_turns():
    assert play(["3", "9", "5"], max_turns=3) == (0.2, ["higher", "lower"], 3)
    assert play(["3", "9", "2"], max_turns=3) == (0.0, ["higher", "lower"], 3)


def test_guess_number_without_a_second_turn_gives_nothing_for_a_wrong_guess():
    assert play(["5"], max_turns=1) == (0.0, [], 1)


def test_environments_of_skyrl_gym_work_as_they_are():
    env = make_env("gsm8k", {}, extras("42"))
    assert env.step("so it is #### 42")["reward"] == 1.0


def test_environment_that_the_user_registered_is_found():
    skyrl_gym.register(id="mine", entry_point=lambda env_config, extras: make_env("addition", env_config, extras))
    try:
        assert make_env("mine", {}, extras("1")).step("1")["reward"] == 1.0
        assert aggregate_env_metrics("mine", [{"a": 1}, {"a": 3}]) == {"a": 2.0}
    finally:
        skyrl_gym.envs.deregister("mine")


class Divides(BaseTextEnv):
    @staticmethod
    def aggregate_metrics(metrics):
        return {"rate": 1 / sum(each["tries"] for each in metrics)}


class Stacks(BaseTextEnv):
    """Its aggregation needs the tensors, and returns numbers of numpy and torch."""

    @staticmethod
    def aggregate_metrics(metrics):
        losses = torch.stack([each["loss"] for each in metrics])
        return {"loss": losses.mean(), "most": np.int64(len(metrics)), "all": losses, "note": "text"}


@pytest.fixture
def named():
    """Registers an environment's class or function for one test."""
    names = []

    def add(name, entry_point):
        skyrl_gym.register(id=name, entry_point=entry_point)
        names.append(name)
        return name

    yield add
    for name in names:
        skyrl_gym.envs.deregister(name)


def test_an_aggregation_that_raises_is_logged_with_its_line_and_gives_no_metrics(named, caplog):
    name = named("divides", Divides)
    assert aggregate_env_metrics(name, [{"tries": 4}]) == {"rate": 0.25} and not caplog.records
    assert aggregate_env_metrics(name, [{"tries": 0}]) == {}
    assert aggregate_env_metrics("no environment", [{"tries": 1}, {"tries": 2}]) == {"tries": 1.5}
    line = f"{__file__}:{Divides.aggregate_metrics.__code__.co_firstlineno + 2}"
    problem = f"aggregate_metrics raised ZeroDivisionError: division by zero ({line})"
    assert caplog.messages == [f"metrics of the environment divides are left out: {problem}"]
    assert caplog.records[0].levelno == logging.ERROR


@pytest.mark.parametrize(
    "entry_point", [BaseTextEnv, lambda env_config, extras: BaseTextEnv()], ids=["class", "function"]
)
def test_metrics_may_be_numbers_of_numpy_and_torch_and_what_is_no_number_is_said_once(named, caplog, entry_point):
    name = named(f"numbers_{type(entry_point).__name__}", entry_point)
    some = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(0.25), "d": np.True_, "e": 1, "f": 0.5}
    for _ in range(2):
        metrics = aggregate_env_metrics(name, [some, some | {"list": [1], "text": "x", "none": None}])
        assert metrics == {"a": 0.5, "b": 3.0, "c": 0.25, "d": 1.0, "e": 1.0, "f": 0.5}
        assert {type(value) for value in metrics.values()} == {float}
    said = f"the metric list of the environment {name} is left out: it is a list, not a number"
    assert caplog.messages == [said]


def test_an_aggregation_of_ones_own_gets_the_metrics_as_they_are(named, caplog):
    name = named("stacks", Stacks)
    metrics = aggregate_env_metrics(name, [{"loss": torch.tensor(0.5)}, {"loss": torch.tensor(1.0)}])
    assert metrics == {"loss": 0.75, "most": 2} and {type(value) for value in metrics.values()} == {float, int}
    assert caplog.messages == ["the metric all of the environment stacks is left out: it is a Tensor, not a number"]


def test_registering_the_built_in_environments_again_changes_nothing():
    before = dict(skyrl_gym.registry)
    register_built_in()
    assert skyrl_gym.registry == before


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gms8k", r"unknown environment 'gms8k' \(did you mean gsm8k.*Use one of addition, aime"),
        ("zzz", r"unknown environment 'zzz'. Use one of"),
        (
            "no_such_module:Env",
            r"the environment is 'no_such_module:Env', and no_such_module cannot be imported .*PYTHONPATH",
        ),
        ("mymodule:MyEmv", r"mymodule \(.*\) has no MyEmv: did you mean MyEnv\?"),
        ("mymodule:Other", r"the environment is 'mymodule:Other': it is not a subclass of skyrl_gym's BaseTextEnv"),
        ("broken:Env", r"broken cannot be imported \(ModuleNotFoundError: No module named 'missing_dependency'\)"),
    ],
)
def test_unknown_environment_is_an_error_that_names_the_nearest(tmp_path, monkeypatch, name, problem):
    text = "from skyrl_gym.envs.base_text_env import BaseTextEnv\nclass MyEnv(BaseTextEnv): ...\nclass Other: ...\n"
    module_with(tmp_path, monkeypatch, "mymodule", text)
    module_with(tmp_path, monkeypatch, "broken", "import missing_dependency\n")
    with pytest.raises(ValueError, match=problem):
        env_creator(name)


def test_example_of_the_documentation_runs(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    module_with(tmp_path, monkeypatch, "palindrome", code[1])
    env = make_env("palindrome:PalindromeEnv", {}, extras(5, max_turns=2))
    hint = env.step("otto")
    assert (hint["done"], hint["observations"][0]["content"]) == (False, "not 4 but 5 letters")
    assert env.step("level") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
    assert aggregate_env_metrics("palindrome:PalindromeEnv", [env.get_metrics()]) == {"turns": 2.0}


def test_every_config_key_that_the_documentation_names_exists():
    keys = re.findall(r"`((?:generator|environment)\.[a-z_.]+)", DOCUMENT.read_text())
    config = (DOCUMENT.parents[1] / "configs" / "ppo_base_config.yaml").read_text()
    leaves = {key.removesuffix(".").split(".")[-1] for key in keys}
    assert len(leaves) >= 5
    assert [leaf for leaf in leaves if f"{leaf}:" not in config] == []
