"""GSM8K's rows are those of skyrl_train 0.4, and skyrl-gym's environment rewards the right answer to them."""

from __future__ import annotations

import json

import datasets
import pytest

from skyrl_train.envs.registry import make_env
from skyrl_train.tasks.gsm8k import gsm8k_row, main

QUESTION = "Weng earns $12 an hour. How much are 90 hours?"
GIVEN = {"question": QUESTION, "answer": "90 hours are 12*90=<<12*90=1080>>1080.\n#### 1,080"}
WRITTEN = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {
            "role": "user",
            "content": QUESTION + ' Let\'s think step by step and output the final answer after "####".',
        }
    ],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "1080"},
    "extra_info": {"split": "test", "index": 0, "answer": GIVEN["answer"], "question": QUESTION},
}


def test_a_row_has_the_instruction_and_the_number_without_its_comma():
    expected = {**WRITTEN, "extra_info": {"answer": GIVEN["answer"], "question": QUESTION}}
    assert gsm8k_row(GIVEN) == expected
    assert make_env("gsm8k", {}, gsm8k_row(GIVEN)).step("so #### 1080")["reward"] == 1.0


@pytest.mark.parametrize(
    ("row", "problem"),
    [({"question": "x"}, "has no answer"), ({**GIVEN, "answer": "12"}, "no line `#### NUMBER`: '12'")],
)
def test_another_row_is_refused(row, problem):
    with pytest.raises(ValueError, match=problem):
        gsm8k_row(row)


def test_the_files_are_those_of_skyrl_train_04(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "copy"
    (source / "main").mkdir(parents=True)
    for split, num_rows in (("train", 2), ("test", 1)):
        (source / "main" / f"{split}.jsonl").write_text((json.dumps(GIVEN) + "\n") * num_rows)
    files = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (source / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    main(["--output_dir", str(tmp_path / "out"), "--source", str(source)])
    read = datasets.load_dataset("parquet", data_files=str(tmp_path / "out" / "validation.parquet"), split="train")
    assert read.to_list() == [WRITTEN]
    assert list(read.features) == list(WRITTEN)
    assert "train.parquet: 2 rows" in capsys.readouterr().out


def test_a_source_that_cannot_be_read_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as end:
        main(["--output_dir", str(tmp_path / "out"), "--source", str(tmp_path / "empty")])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'empty'} cannot be read")
