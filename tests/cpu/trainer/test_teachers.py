"""Which teacher scores which samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, PretrainedConfig

from skyrl_train.batching.hinted import with_prompts
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import split
from skyrl_train.checks.distillation import check_data_sources
from skyrl_train.cluster.pool.settings import all_engine_settings, teacher_engine_settings
from skyrl_train.cluster.ranks import shards as shards_module
from skyrl_train.cluster.ranks.scorer_group import ScorerGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.config import load_config
from skyrl_train.data.hints import Hints
from skyrl_train.megatron.policy import _by_field
from skyrl_train.trainer.build import max_model_len, teacher_max_model_len
from skyrl_train.trainer.scorers import EngineScorer, Scorers
from skyrl_train.types import TeacherPrompt, TrainBatch
from tests.cpu.batching.test_split import experience_of

SOURCES = ["math", "code", "math", "poems"]
"""Of samples 0 to 3."""


def shard(samples: list[int], mini_batches: Any) -> TrainBatch:
    nothing = torch.zeros(0)
    return TrainBatch(nothing, nothing, nothing, {}, {}, torch.tensor(samples), mini_batches)


class Recorded(ScorerGroup):
    """Records the micro-batches that it scores."""

    scored: list[Any]

    async def score(self, shards: Shards) -> list[Any]:
        self.scored = [batch.mini_batches for batch in shards.batches]
        return self.scored


class NoResidency:
    async def for_scoring(self, scorer: ScorerGroup) -> None: ...

    async def for_training(self) -> None: ...


def scored(
    monkeypatch: pytest.MonkeyPatch, *overrides: str, sources: list[str] = SOURCES, hinted: bool = False
) -> dict[str, Any]:
    """Name of each scorer -> micro-batches of both shards: samples 2, 0 in one each, 1 and 3 together; hinted: 2 and 0
    together."""
    monkeypatch.setattr(shards_module, "ray", SimpleNamespace(put=lambda batch: batch))
    trainer = load_config(["trainer.policy_mini_batch_size=1024", *overrides]).trainer
    model: Any = SimpleNamespace()
    scorers = [Recorded(m.name, m.signal, model, "logprobs", m.data_sources) for m in trainer.frozen_models]
    shards = Shards([shard([2, 0], (((0,), (1,)),)), shard([1, 3], (((0, 1), ()),))])
    residency: Any = NoResidency()
    own = Shards([shard([2, 0], (((0, 1),),)), shard([1, 3], (((0, 1),),))]) if hinted else None
    refs = asyncio.run(Scorers(trainer, model, scorers, residency).score(shards, sources, own))
    assert refs == {scorer.signal: scorer.scored for scorer in scorers if hasattr(scorer, "scored")}
    return {scorer.name: getattr(scorer, "scored", None) for scorer in scorers}


ALL = [(((0,), (1,)),), (((0, 1), ()),)]


def test_one_teacher_scores_all_samples_beside_the_reference(monkeypatch: pytest.MonkeyPatch):
    assert scored(monkeypatch, "trainer.teacher.model.path=a") == {"reference": ALL, "teacher": ALL}


def test_every_teacher_scores_the_samples_of_its_data_sources_in_micro_batches_of_equal_number(
    monkeypatch: pytest.MonkeyPatch,
):
    sources = "trainer.teacher.model.path_of_data_source={math: m, code: a, prose: p}"
    found = scored(monkeypatch, "trainer.teacher.model.path=a", sources)
    assert found == {
        "reference": ALL,
        "teacher_0": [(((), ()),), (((0, 1), ()),)],
        "teacher_1": [(((0,), (1,)),), (((), ()),)],
        "teacher_2": None,
    }


def test_teachers_alone_read_the_hints(monkeypatch: pytest.MonkeyPatch):
    together = [(((0, 1),),), (((0, 1),),)]
    assert scored(monkeypatch, "trainer.teacher.model.path=a", hinted=True) == {"reference": ALL, "teacher": together}
    sources = "trainer.teacher.model.path_of_data_source={math: m}"
    assert scored(monkeypatch, "trainer.teacher.model.path=a", sources, hinted=True) == {
        "reference": ALL,
        "teacher_0": [(((),),), (((0, 1),),)],
        "teacher_1": [(((0, 1),),), (((),),)],
    }


@pytest.mark.parametrize("hinted", [False, True])
def test_engines_score_the_chosen_samples_at_the_tokens_of_the_policys_shards(
    monkeypatch: pytest.MonkeyPatch, hinted: bool
):
    """The logprob of each token is its negative id; the teacher's prompt has two tokens more than the sample's one."""
    monkeypatch.setattr(shards_module, "ray", SimpleNamespace(put=lambda batch: batch))
    limits = MicroBatchLimits(dp_size=2, max_tokens=12, max_sample_tokens=100)
    batches: Any = split(experience_of([4, 3, 6, 5]), limits)
    if hinted:
        batches = with_prompts(batches, [TeacherPrompt(1, torch.tensor([90, 91, 92]))] * 4, limits)
    read: list[list[int]] = []

    class Negative:
        async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
            read.extend(prompts)
            return [[0.0, *(-float(token) for token in prompt[1:])] for prompt in prompts]

    shards = Shards(batches).only([True, False, True, True])
    found = asyncio.run(EngineScorer("teacher", Negative()).score(shards))
    merged = Shards(split(experience_of([4, 3, 6, 5]), limits)).merged(
        [fields["teacher_logprobs"] for fields in found], experience_of([4, 3, 6, 5])
    )
    expected = -torch.arange(18.0)
    expected[[0, 4, 5, 6, 7, 13]] = 0  # first tokens, and the sample that is not chosen
    assert torch.equal(merged, expected)
    start = [90, 91, 92] if hinted else []
    assert sorted(read) == sorted([*start, *ids[hinted:]] for ids in ([0, 1, 2, 3], [*range(7, 13)], [*range(13, 18)]))


def test_with_adapters_the_policys_own_ranks_score_as_the_teacher_of_its_path():
    lora = ["trainer.policy_mini_batch_size=1024", "trainer.policy.model.path=a", "trainer.policy.model.lora.rank=2"]
    teachers = ["trainer.teacher.model.path=a", "trainer.teacher.model.path_of_data_source={math: m}"]
    trainer = load_config([*lora, *teachers]).trainer
    assert [model.name for model in trainer.base_teachers] == ["teacher_0"]
    assert [model.name for model in trainer.frozen_models] == ["teacher_1"]
    assert not load_config([*lora[:2], *teachers]).trainer.base_teachers
    assert not load_config([*lora, *teachers, "trainer.teacher.backend=engine"]).trainer.base_teachers


def test_teachers_of_one_path_are_one_model(monkeypatch: pytest.MonkeyPatch):
    one = "trainer.teacher.model.path_of_data_source={math: m, code: m, poems: m}"
    assert scored(monkeypatch, one) == {"reference": ALL, "teacher": ALL}


def test_a_data_source_without_a_teacher_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"data source poems has no teacher. Add it to .*path_of_data_source, or set"):
        scored(monkeypatch, "trainer.teacher.model.path_of_data_source={math: m, code: c}")


def test_data_sources_of_rows_and_of_teachers_are_compared_before_anything_starts(caplog: pytest.LogCaptureFixture):
    sources, path = "trainer.teacher.model.path_of_data_source={math: m, code: c}", "trainer.teacher.model.path=a"
    check_data_sources(load_config([sources]), {"math", "code"})
    check_data_sources(load_config([path]), {"math", "code"})
    assert not caplog.records
    with pytest.raises(ValueError, match=r"data source maths has no teacher. Add it to .*path_of_data_source, or set"):
        check_data_sources(load_config([sources]), {"maths", "code"})
    check_data_sources(load_config([sources, path]), {"maths", "code"})
    assert "names math, but the training rows have the data sources code, maths" in caplog.text


def test_the_signals_of_several_teachers_are_added_by_field():
    first = {"teacher_logprobs": torch.tensor([-1.0, 0.0])}
    second = {"teacher_logprobs": torch.tensor([0.0, -2.0])}
    fields = _by_field({"advantages": torch.ones(2), "teacher_0": first, "teacher_1": second})
    assert {name: values.tolist() for name, values in fields.items()} == {
        "advantages": [1, 1],
        "teacher_logprobs": [-1, -2],
    }


def test_engines_of_a_teacher_are_not_quantised():
    overrides = ["trainer.policy.model.path=a", "trainer.teacher.model.path=b", "trainer.teacher.backend=engine"]
    config = load_config([*overrides, "generator.quantization=fp8"])
    (teacher,) = config.trainer.served_teachers
    assert [one.generator.quantization for one in teacher_engine_settings(config, teacher, 64, "shm")] == [None]
    assert [one.generator.quantization for one in all_engine_settings(config, 64, "shm")] == ["fp8"]


def test_an_engine_of_a_teacher_takes_the_longest_sample_with_its_hint_and_one_token_more():
    config = load_config(
        [
            "trainer.teacher.model.path=a",
            "trainer.teacher.backend=engine",
            "generator.max_input_length=100",
            "generator.sampling_params.max_generate_length=50",
            "generator.eval_sampling_params.max_generate_length=900",
        ]
    )
    model, chat = PretrainedConfig(max_position_embeddings=512), SimpleNamespace()

    def hinted(max_tokens: int | None) -> Hints:
        return Hints(lambda group, sample: None, chat, max_tokens)  # type: ignore[arg-type]

    assert teacher_max_model_len(config, model) == 151, "evaluations are not scored"
    assert teacher_max_model_len(config, model, hinted(170)) == 171
    assert teacher_max_model_len(config, model, hinted(None)) == 512
    with pytest.raises(ValueError, match="fewer than the model's 150 positions"):
        teacher_max_model_len(config, PretrainedConfig(max_position_embeddings=150))


def test_the_lengths_of_a_model_with_images_are_those_of_its_text():
    text = {"max_position_embeddings": 300, "num_hidden_layers": 1}
    model = Gemma3Config(text_config=text, vision_config={"num_hidden_layers": 1})
    assert not hasattr(model, "max_position_embeddings")
    assert max_model_len(load_config([]), model) == 300
