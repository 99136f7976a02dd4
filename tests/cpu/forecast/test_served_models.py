"""Forecasts count the GPUs that a run reserves, and what engines of teachers need on theirs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.cluster import placement
from skyrl_train.cluster.demands import demands
from skyrl_train.cluster.sharing import build_sharing
from skyrl_train.config import Config
from skyrl_train.config.rl import PLAN
from skyrl_train.device.kinds import device_kind
from skyrl_train.engines.vllm.memory import BYTES_PER_LOGIT
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.fit import other_models
from skyrl_train.forecast.forecast import Forecast, Inputs, forecast, workload_of
from skyrl_train.forecast.parts import GIB
from skyrl_train.forecast.proposals import problems, proposals
from skyrl_train.forecast.report import gpus_line, introduction, limits, refusal, summary
from skyrl_train.forecast.shapes import model_config
from skyrl_train.hf.matrices import num_parameters
from skyrl_train.trainer.build import teacher_max_model_len

POLICY, TEACHER = "qwen3-0.6b", "qwen3-30b-a3b"
SERVED = ["trainer.teacher.backend=engine", f"trainer.teacher.model.path={TEACHER}"]
EVALUATED = ["trainer.source=streaming", "trainer.eval_interval=1", "data.val_data=[a.jsonl]"]
ENGINES, WIDE = "generator.num_inference_engines", "generator.inference_engine_tensor_parallel_size=2"
WHY = "because an engine does not span nodes"
SHARED = ["trainer.placement.colocate_all=true", WIDE]
RESERVED = [f"{ENGINES}=3", WIDE, "generator.eval_num_engines=1"]
WIDTH = "trainer.teacher.inference_engine_tensor_parallel_size"


def inputs(device: str, *overrides: str) -> Inputs:
    config = PLAN.load([f"trainer.policy.model.path={POLICY}", *overrides])
    kind = device_kind(device)
    assert kind is not None
    models = {name: model_config(name) for name in (POLICY, TEACHER)}
    return Inputs(config, models, kind, workload_of(config))


def made(device: str, *overrides: str) -> Forecast:
    given = inputs(device, *overrides)
    return forecast(replace(given, config=chosen(given).config))


def parts(found: Forecast, phase: str) -> dict[str, float]:
    return {part.name: part.likely for each in found.phases if each.phase == phase for part in each.parts}


@pytest.mark.parametrize("width", [1, 2])
def test_engines_of_a_teacher_hold_its_weights_and_leave_room_for_scores(width: int):
    found = parts(made("h200", *SERVED, f"{WIDTH}={width}"), "teacher")
    assert found["weights"] == num_parameters(model_config(TEACHER)) * 2 // width
    longest = teacher_max_model_len(PLAN.load(SERVED), model_config(TEACHER))
    assert found["logits of a scored sample"] == longest * 151_936 * BYTES_PER_LOGIT
    assert found["KV cache"] > 0.4 * 139.8 * GIB and "arriving weights" not in found


def test_a_teacher_that_its_engines_cannot_hold_is_refused():
    given = inputs("l40s", *SERVED)
    found = forecast(replace(given, config=chosen(given).config))
    assert [phase.phase for phase in found.impossible] == ["teacher"] and proposals(given) == []
    message = refusal(found, [])
    assert "teacher needs at least 5" in message and f"Raise {WIDTH}" in message
    assert made("l40s", *SERVED, f"{WIDTH}=4").fits


def test_engines_of_a_teacher_change_nothing_that_is_chosen_for_trainers():
    without, served = chosen(inputs("h100")), chosen(inputs("h100", *SERVED))
    assert served.made == without.made


@pytest.mark.parametrize(
    ("overrides", "phases", "is_timed"),
    [
        (SERVED, ["teacher"], True),
        ([*SERVED, f"trainer.teacher.model.path_of_data_source={{a: {POLICY}}}"], ["teacher_0", "teacher_1"], True),
        (["trainer.teacher.backend=remote", "trainer.teacher.model.path=http://a:1"], [], False),
        ([SERVED[1]], ["teacher"], True),  # on ranks
        (["trainer.teacher.backend=policy"], [], True),
    ],
    ids=["engines", "engines of two", "server", "ranks", "policy"],
)
def test_teachers_take_memory_where_they_run(overrides: list[str], phases: list[str], is_timed: bool):
    found = made("h200", *overrides)
    assert [phase.phase for phase in found.phases if "teacher" in phase.phase] == phases
    assert any("teacher" in time.phase for time in found.times) is is_timed


def test_engines_of_a_teacher_share_its_samples():
    one, two = (
        next(time.seconds for time in made("h200", *SERVED, *more).times if time.phase == "teacher")
        for more in ([], ["trainer.teacher.num_inference_engines=2"])
    )
    assert two == pytest.approx(one / 2)
    # 5,120 samples of 1,536 tokens, 2 FLOPs for each of 3.03 billion weights that a token uses, and attention's.
    assert one == pytest.approx(5120 * 1536 * 2 * 3.03e9 / (0.6 * 989e12), rel=0.2)


def test_a_teacher_of_an_unknown_family_is_reported_and_not_counted(tmp_path: Path):
    for name, kind in (("teacher", "mamba"), ("reference", "qwen3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind}))
    unknown = ["trainer.teacher.backend=engine", f"trainer.teacher.model.path={tmp_path}/teacher"]
    given = inputs("h200", *unknown, f"trainer.ref.model.path={tmp_path}/reference")
    models = other_models(given.config, lambda key, path: path)
    assert list(models) == [f"{tmp_path}/reference"]
    found = forecast(replace(given, models={**given.models, **models}))
    assert found.uncounted == ("teacher",) and not parts(found, "teacher")
    assert "not counted: teacher" in limits(found) and "not counted: teacher" in summary(found)


def reserved(config: Config, monkeypatch: pytest.MonkeyPatch) -> int:
    """GPUs of the bundles that placement asks Ray for."""
    asked: list[dict[str, float]] = []

    async def reserve(found: Any, bundles: list[dict[str, float]], settings: Any) -> None:
        asked.extend(bundles)
        raise placement.PlacementError("recorded")

    monkeypatch.setattr(placement, "_reserve", reserve)
    with pytest.raises(placement.PlacementError, match="recorded"):
        asyncio.run(build_sharing(config).reserve(demands(config), use_gpus=True))
    return int(sum(bundle.get("GPU", 0) for bundle in asked))


@pytest.mark.parametrize(
    ("overrides", "total", "text"),
    [
        ([], 3, "1 policy ranks, 1 reference ranks, 1 engines"),
        (
            [*SERVED, f"{WIDTH}=2", "trainer.teacher.num_inference_engines=3"],
            9,
            "1 policy ranks, 1 reference ranks, 3 engines of the teacher with 2 each, 1 engines",
        ),
        (["trainer.teacher.backend=remote", "trainer.teacher.model.path=http://a:1"], 3, "1 engines"),
        (
            ["trainer.placement.colocate_all=true", "generator.num_inference_engines=1"],
            1,
            "shared by 1 policy ranks, 1 reference ranks, 1 engines",
        ),
        ([*EVALUATED, *RESERVED], 8, "3 engines with 2 each, 1 of them for evaluation"),
        (["generator.run_engines_locally=false", "generator.remote_inference_engine_urls=[http://a:1]"], 2, "ranks"),
        (["generator.inference_engine_tensor_parallel_size=16"], 18, f"16 each; a node needs 16, {WHY}"),
        (["trainer.placement.policy_num_nodes=2", *SHARED], 2, f"2 each; a node needs 2, {WHY}"),
    ],
    ids=[
        "default",
        "engines of a teacher",
        "server of a teacher",
        "shared",
        "evaluation",
        "servers",
        "wide",
        "shared nodes",
    ],
)
def test_the_report_shows_the_gpus_that_placement_reserves(
    overrides: list[str], total: int, text: str, monkeypatch: pytest.MonkeyPatch
):
    given = inputs("h200", *overrides)
    assert isinstance(given.config, Config)
    assert reserved(given.config, monkeypatch) == total
    line = gpus_line(given.config)
    assert line.startswith(f"{total} in all") and line.endswith(text)
    assert line in introduction(given, forecast(given))


def test_engines_reserved_for_evaluation_generate_nothing_for_a_step_and_need_the_memory_of_the_others():
    reserved, two, three = (
        made("h200", *EVALUATED, *engines) for engines in (RESERVED, [f"{ENGINES}=2", WIDE], [f"{ENGINES}=3", WIDE])
    )
    assert reserved.times == two.times and reserved.phases == three.phases
    seconds = [next(time.seconds for time in each.times if time.phase == "generation") for each in (reserved, three)]
    assert seconds[0] == pytest.approx(seconds[1] * 3 / 2, rel=0.01)


def test_engines_that_leave_none_for_training_are_refused():
    given = inputs("h200", *EVALUATED, f"{ENGINES}=2", "generator.eval_num_engines=2")
    assert any("training needs at least one of the 2 engine(s)" in problem for problem in problems(given))
