"""A model folder is recognised by what is computed with, not by its path or the form of its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.hf.identity import change, identity
from tests.support.families import write_family


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3", tmp_path_factory.mktemp("identity") / "model")


def edited(source: Path, folder: Path, **fields: Any) -> str:
    """A copy with other fields in its config.json."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rms_norm_eps": 0.1}, "has another config.json (rms_norm_eps is 0.1, was 1e-06)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "'rope_theta': 7.0"),
        ({"rms_norm_eps": 0.1, "head_dim": 2}, "(head_dim is 2, was "),
        ({"hidden_act": "swish", "use_mrope": False, "is_decoder": False, "output_router_logits": True}, None),
        ({"use_cache": False, "transformers_version": "9", "max_position_embeddings": 9, "dtype": "bfloat16"}, None),
    ],
)
def test_fields_that_are_computed_with_must_stay(
    fields: dict[str, Any], expected: str | None, source: Path, tmp_path: Path
):
    kept = json.loads(json.dumps(identity(str(source), has_frozen_weights=False)))
    said = change(kept, edited(source, tmp_path / "copy", **fields))
    assert said is None if expected is None else said is not None and expected in said


def test_a_field_with_its_default_or_in_an_older_form_is_no_change(source: Path, tmp_path: Path):
    kept = identity(str(source), has_frozen_weights=False)
    folder = tmp_path / "old"
    shutil.copytree(source, folder)
    given = json.loads((folder / "config.json").read_text())
    rope = given.pop("rope_parameters")
    del given["attention_dropout"]
    assert AutoConfig.for_model(**given | {"rope_theta": rope["rope_theta"]}).rope_parameters == rope
    (folder / "config.json").write_text(json.dumps(given | {"rope_theta": rope["rope_theta"]}))
    assert change(kept, str(folder)) is None


def test_weights_must_stay_where_they_are_frozen(source: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(source, other)
    model = AutoModelForCausalLM.from_pretrained(source)
    for weight in model.parameters():
        weight.data += 1
    model.save_pretrained(other)
    frozen, trained = (identity(str(source), has_frozen_weights=has) for has in (True, False))
    assert change(frozen, str(other)) == "has other weights" and change(frozen, str(source)) is None
    assert change(trained, str(other)) is None, "a checkpoint has them all"


def test_a_checkpoint_without_an_identity_is_accepted(source: Path):
    assert change({"path": "model"}, str(source)) is None
