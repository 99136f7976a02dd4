"""The quickstart's bigger sister: its rows, and a model that every layout can cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config import ConfigError, load_config
from skyrl_train.tasks import long_addition, warm_start
from skyrl_train.tasks.long_addition import MODEL, TRAIN_DATA, VALIDATION_DATA, long_addition_rows, model_config
from skyrl_train.tasks.tiny import Row, sum_row, tokenizer
from skyrl_train.tasks.tiny import model_config as tiny_model


def operands(row: Row) -> tuple[int, int]:
    a, b = row["prompt"][0]["content"].removesuffix("=").split("+")
    return int(a), int(b)


def test_no_pair_occurs_twice_in_either_order_so_none_is_in_both_files():
    train, validation = long_addition_rows(0)
    assert (len(train), len(validation)) == (10_000, 500)
    assert len({frozenset(operands(row)) for row in (*train, *validation)}) == 10_500


def test_prompts_have_three_digits_each_and_rows_say_their_sum():
    config = load_config(["+experiment=long_addition"])
    characters = tokenizer()
    longest = config.generator.sampling_params.max_generate_length
    for row in (row for rows in long_addition_rows(1) for row in rows):
        prompt, answer = row["prompt"][0]["content"], row["reward_spec"]["ground_truth"]
        assert len(prompt) == len("123+456=") and int(answer) == sum(operands(row))
        assert characters.unk_token_id not in characters.encode(prompt + answer)
        assert len(characters.encode(answer)) + 1 <= longest  # the end of the sequence is a token, too


def test_prepare_makes_what_the_experiment_asks_for():
    config = load_config(["+experiment=long_addition"])
    assert config.data.train_data == (str(TRAIN_DATA),) and config.data.val_data == (str(VALIDATION_DATA),)
    assert config.trainer.policy.model.path == str(MODEL)


def test_rows_depend_on_the_seed_alone():
    assert long_addition_rows(3) == long_addition_rows(3)
    assert long_addition_rows(3)[1] != long_addition_rows(4)[1]


def test_a_sum_is_written_with_the_digits_that_were_asked_for():
    row = sum_row(7, 95, num_digits=4)
    assert row["prompt"][0]["content"] == "0007+0095=" and row["reward_spec"]["ground_truth"] == "102"


def test_the_model_has_the_size_of_its_docs_and_can_be_cut_in_every_way():
    from transformers import Qwen3ForCausalLM

    config = model_config()
    assert 3.1e6 < Qwen3ForCausalLM(config).num_parameters() < 3.3e6
    # Two stages of two chunks each, and whole key heads for each of four tensor-parallel ranks.
    assert config.num_hidden_layers % 4 == 0
    assert config.num_attention_heads % 4 == config.num_key_value_heads % 4 == 0


def test_only_files_that_the_configuration_asks_for_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(["+experiment=long_addition", "data.val_data=[mine.jsonl]", "trainer.policy.model.path=mine"])
    long_addition.prepare(config)
    assert [path.name for path in Path("long_addition").iterdir()] == ["train.jsonl"]


def test_a_warm_start_that_learns_its_answers_leaves_a_model_that_gives_them(tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    answers = [("a", "1"), ("b", "22")]
    warm_start.warm_start(folder, 0, tiny_model(), answers * warm_start.BATCH_SIZE, answers, target=0.9)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt, answer in answers:
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=5, do_sample=False)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == prompt + answer
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "no draft is left"


def test_a_warm_start_that_learns_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_start, "MAX_STEPS", 5)
    answers = [("1+1=", "2")] * warm_start.BATCH_SIZE
    with pytest.raises(ConfigError, match="model did not reach 1.1 in 5 steps"):
        warm_start.warm_start(tmp_path / "model", 0, tiny_model(), answers, answers, target=1.1)
    assert not (tmp_path / "model").exists()
