"""What the command line says to a person: one clear error each, before anything heavy starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from skyrl_train.entrypoints import command, main_base, run
from skyrl_train.entrypoints.ending import report_failure
from tests.support.jobs import write_world

CONSTRUCTORS = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class Bare(BaseTextEnv):
    pass
class OfRows(BaseTextEnv):
    def __init__(self, extras): raise AssertionError("it may be expensive: it is not created")
class More(BaseTextEnv):
    def __init__(self, env_config, extras, judge): raise AssertionError("it is not created")
class Stepless(BaseTextEnv):
    def __init__(self, env_config, extras): raise AssertionError("it is not created")
"""


@pytest.fixture(scope="module")
def made_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("errors") / "world")


@pytest.fixture
def world(made_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a world whose runs must never come as far as Ray."""

    def never() -> None:
        raise AssertionError("Ray was started")

    monkeypatch.chdir(made_world)
    monkeypatch.syspath_prepend(str(made_world))
    monkeypatch.setattr(run, "connect", never)
    # main sets SIGTERM's handler, which is the test runner's own business here.
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "500")
    return made_world


def error(capsys: pytest.CaptureFixture[str], *arguments: str, experiment_name: str = "tiny") -> str:
    """The console of a command line that must end with exit code 2 and begin with the error."""
    code = main_base.main([f"+experiment={experiment_name}", *arguments])
    printed = capsys.readouterr().out
    assert code == 2 and printed.startswith("error: ") and printed.count("error: ") == 1, printed
    return printed


def test_a_misspelt_key_on_the_command_line_names_the_nearest(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "trainer.train_batchsize=4")
    assert "trainer.train_batchsize" in message and "trainer.train_batch_size" in message
    assert "command line" in message


def test_a_misspelt_key_in_an_experiment_file_names_file_and_nearest(world: Path, capsys: pytest.CaptureFixture[str]):
    text = (world / "configs/experiment/tiny.yaml").read_text()
    (world / "configs/experiment/wrong.yaml").write_text(
        text.replace("policy_mini_batch_size", "policy_mini_batchsize")
    )
    message = error(capsys, experiment_name="wrong")
    assert "trainer.policy_mini_batchsize" in message and "trainer.policy_mini_batch_size" in message
    assert "configs/experiment/wrong.yaml" in message


def test_an_experiment_of_another_program_is_named_with_its_command(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, experiment_name="sft_quickstart")
    assert "sft_quickstart.yaml is an experiment of another program: this one has no data.max_length" in message
    assert "Run python -m skyrl_train.entrypoints.main_sft +experiment=sft_quickstart" in message


@pytest.mark.parametrize("name", ["own_environment:Digits", "adition"])
def test_an_environment_that_no_row_uses_is_refused(world: Path, capsys: pytest.CaptureFixture[str], name: str):
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "env_class": "addition", "answer": "2"}] * 32
    (world / "asking.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["data.train_data=[asking.jsonl]", "data.val_data=[]", f"environment.env_class={name}"]
    message = error(capsys, *given)
    assert f"environment.env_class is {name}: no row uses it, since each has an env_class (addition)" in message
    assert "Set data.columns.env_class=null" in message


def test_a_reward_function_that_no_training_row_uses_is_refused(world: Path, capsys: pytest.CaptureFixture[str]):
    """Also if rows of the evaluation do."""
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    (world / "asking.jsonl").write_text((json.dumps(row | {"env_class": "addition"}) + "\n") * 32)
    (world / "free.jsonl").write_text((json.dumps(row) + "\n") * 32)
    (world / "own_reward.py").write_text("def right(completions, **columns):\n    return [1.0] * len(completions)\n")
    given = ["environment.reward_fn=own_reward:right", "environment.env_class=reward_fn"]
    message = error(capsys, "data.train_data=[asking.jsonl]", "data.val_data=[free.jsonl]", *given)
    assert "environment.reward_fn is own_reward:right: no training row uses it, since each has an env_" in message


def test_an_unknown_environment_says_who_asks_for_it_and_how_to_register_it(
    world: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "env_class": "multiply"}] * 32
    (world / "asking.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = error(capsys, "data.train_data=[asking.jsonl]")
    assert "unknown environment 'multiply'" in message and "a row asks for it, in its column env_class" in message
    assert "skyrl_gym.register(id='multiply', entry_point='module:Class')" in message
    assert "trainer.custom_modules" in message


def test_settings_of_an_unknown_environment_are_refused(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "environment.skyrl_gym.env_kwargs.serach.topk=3")
    assert "env_kwargs.serach is read by nobody: unknown environment 'serach' (did you mean search" in message


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        ("Bare", "(): got an unexpected keyword argument 'env_config'"),
        ("OfRows", "(extras): got an unexpected keyword argument 'env_config'"),
        ("More", "(env_config, extras, judge): missing a required argument: 'judge'"),
    ],
)
def test_an_own_environment_that_cannot_be_created_as_environments_are_is_found_before_ray(
    kind: str, takes: str, world: Path, capsys: pytest.CaptureFixture[str]
):
    (world / "own_constructors.py").write_text(CONSTRUCTORS)
    message = error(capsys, f"environment.env_class=own_constructors:{kind}", "data.columns.env_class=null")
    assert message.startswith(
        f"error: the environment is 'own_constructors:{kind}': it is created as {kind}(env_config=..., extras=...), "
        f"and takes {takes}. Define __init__(self, env_config, extras)"
    )


def test_an_own_environment_without_a_step_is_found_before_ray(world: Path, capsys: pytest.CaptureFixture[str]):
    (world / "own_constructors.py").write_text(CONSTRUCTORS)
    message = error(capsys, "environment.env_class=own_constructors:Stepless", "data.columns.env_class=null")
    assert message.startswith(
        "error: the environment is 'own_constructors:Stepless': Stepless defines no step. Define step(self, action), "
    )


@pytest.mark.parametrize(
    ("train", "val", "prompt", "has"),
    [
        ([{"answer": "2"}, {}], [], "prompt 1 from gaps.jsonl, line 2", "prompt"),
        ([{"answer": None}, {"answer": "2"}, {"level": 1}], [], "prompt 2 from gaps.jsonl, line 3", "level, prompt"),
        ([{"answer": "2"}], [{"solution": "2"}], "prompt 0 from val.jsonl, line 1", "solution, prompt"),
    ],
)
def test_a_row_that_lacks_a_column_of_a_reward_function_is_found_before_ray_wherever_it_is(
    train: list[dict[str, Any]],
    val: list[dict[str, Any]],
    prompt: str,
    has: str,
    world: Path,
    capsys: pytest.CaptureFixture[str],
):
    """One row of each set of columns is tried, not only the first of all."""
    for name, rows in (("gaps", [*train, *train[:1] * 32]), ("val", val)):
        lines = [json.dumps({**row, "prompt": "1+1="}) + "\n" for row in rows]
        (world / f"{name}.jsonl").write_text("".join(lines))
    (world / "needs_answer.py").write_text("def right(completions, answer, **columns): return [1.0]\n")
    own = ["environment.env_class=reward_fn", "environment.reward_fn=needs_answer:right"]
    data = ["data.train_data=[gaps.jsonl]", f"data.val_data=[{'val.jsonl' if val else ''}]", "trainer.prepare=null"]
    message = error(capsys, *own, *data)
    assert f"the environment reward_fn cannot be created for {prompt}, whose row has the columns {has}: " in message
    assert "missing a required argument: 'answer'" in message


def test_rows_without_what_their_environment_reads_and_an_engine_without_a_cache_size_are_found_before_ray(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums"}] * 32
    (world / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = error(capsys, "environment.env_class=gsm8k", "data.train_data=[bare.jsonl]")
    assert (
        "the environment gsm8k cannot be created for prompt 0 from bare.jsonl, line 1, whose row has the columns"
        in message
    )
    assert "reward_spec" in message and "Add what is missing to the rows" in message
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("skyrl_train.cluster.session.device_type", lambda: "cpu")
    message = error(capsys, "generator.kv_cache_memory_gb=null")
    assert "generator.kv_cache_memory_gb is null: without a GPU every engine would claim" in message


def test_a_missing_model_is_named(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "trainer.policy.model.path=./absent")
    assert "trainer.policy.model.path" in message and "./absent" in message


def test_a_hub_model_that_cannot_be_had_is_named(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "trainer.policy.model.path=nobody/no-such-model")
    assert "nobody/no-such-model" in message and "hub" in message


@pytest.fixture
def broken(world: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(world / "model", tmp_path / "broken"))


def cut_the_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def say_another_width(model: Path) -> None:
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "intermediate_size": 80}))


def lose_the_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut_the_weights, "model.safetensors is not a complete safetensors file"),
        (say_another_width, "tensors have other shapes than in its config.json"),
        (lose_the_tokenizer, "has no tokenizer"),
    ],
)
def test_a_damaged_model_is_refused_before_anything_starts(
    world: Path, capsys: pytest.CaptureFixture[str], broken: Path, damage: Callable[[Path], None], problem: str
):
    damage(broken)
    assert problem in error(capsys, f"trainer.policy.model.path={broken}", f"trainer.ref.model.path={broken}")


def test_a_damaged_reference_is_refused_before_anything_starts(
    world: Path, capsys: pytest.CaptureFixture[str], broken: Path
):
    cut_the_weights(broken)
    message = error(capsys, f"trainer.ref.model.path={broken}", "trainer.algorithm.use_kl_loss=true")
    assert f"trainer.ref.model.path is {broken}: " in message and "not a complete safetensors file" in message


@pytest.mark.parametrize("row", ['{"prompt": 5}', '{"reward_spec": {}}', '{"prompt": '], ids=["number", "none", "cut"])
def test_a_bad_row_names_file_and_row(world: Path, capsys: pytest.CaptureFixture[str], row: str):
    good = (world / "rows.jsonl").read_text().splitlines()
    (world / "bad.jsonl").write_text("\n".join([*good[:3], row, *good[3:]]) + "\n")
    message = error(capsys, "data.train_data=[bad.jsonl]")
    assert "bad.jsonl" in message and ("row 3" in message or "line 4" in message), message


def test_an_unknown_environment_names_those_that_are_known(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "environment.env_class=adition")
    assert "adition" in message and "addition" in message


def test_an_environment_that_cannot_be_imported_is_named(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "environment.env_class=no_such_module:Env")
    assert "no_such_module" in message and "PYTHONPATH" in message


def test_all_problems_are_reported_at_once(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(
        capsys,
        "trainer.policy_mini_batch_size=3",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.policy.megatron_config.pipeline_model_parallel_size=4",
    )
    assert "policy_mini_batch_size" in message and "pipeline" in message and "problems" in message


def test_more_prompts_per_step_than_rows_is_an_error(world: Path, capsys: pytest.CaptureFixture[str]):
    message = error(capsys, "trainer.train_batch_size=64")
    assert "64" in message and "32 prompts" in message


def test_a_folder_that_is_no_runs_folder_is_refused(world: Path, capsys: pytest.CaptureFixture[str]):
    code = main_base.main(["+experiment=tiny", "trainer.run_dir=configs"])
    printed = capsys.readouterr().out
    assert code == 2 and "error: trainer.run_dir" in printed and "not the folder of a run" in printed
    assert sorted(path.name for path in (world / "configs").iterdir()) == ["experiment"]


def test_an_interrupt_while_the_experiment_is_prepared_is_no_stack(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (world / "preparing.py").write_text("def prepare(config):\n    raise KeyboardInterrupt\n")
    assert main_base.main(["+experiment=tiny", "trainer.prepare=preparing:prepare"]) == 130
    assert capsys.readouterr().out == "interrupted\n"


@pytest.mark.parametrize(
    "override",
    ["trainer.prepare=exits:function", "trainer.custom_modules=[exits_now]", "data.row_fn=exits:function"],
)
def test_an_exit_in_code_of_the_user_is_an_error(override: str, world: Path, capsys: pytest.CaptureFixture[str]):
    """With the code 0 a scheduler would take a run that never began for one that ended."""
    (world / "exits.py").write_text("import sys\ndef function(given):\n    sys.exit(7)\n")
    (world / "exits_now.py").write_text("import sys\nsys.exit(7)\n")
    message = error(capsys, override)
    if "exits_now" in override:
        assert "exits_now, which cannot be imported (it called sys.exit(7))" in message
    else:
        assert f"sys.exit(7) was called before the start ({world}/exits.py:3). Raise" in message


def test_a_config_that_is_printed_starts_nothing(world: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main_base.main(["+experiment=tiny", "--cfg", "job"])
    assert ended.value.code in (0, None) and "train_batch_size: 8" in capsys.readouterr().out


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(capsys: pytest.CaptureFixture[str]):
    class FullDisk:
        def __truediv__(self, name: str) -> FullDisk:
            return self

        def open(self, mode: str) -> None:
            raise OSError("No space left on device")

    run_dir: Any = SimpleNamespace(logs=FullDisk())
    report_failure(RuntimeError("engine-0 died"), run_dir, Console())
    printed = capsys.readouterr().out
    assert "error: engine-0 died" in printed and "No space left" in printed and "RuntimeError: engine-0 died" in printed
