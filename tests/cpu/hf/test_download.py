"""Downloads of hub models, from a hub on this machine."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.hf import download as module
from skyrl_train.hf.checkpoint import tensor_shapes
from skyrl_train.hf.download import download
from skyrl_train.hf.hub import local_folder, name_and_revision, seen_from_anywhere
from tests.support.local_hub import COMMIT, LocalHub, local_hub
from tests.support.tiny import write_tiny_model

KEY = "trainer.policy.model.path"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with files that no run reads."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path_factory.mktemp("hub") / "model")
    whole = folder / "model.safetensors"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="300KB")
    whole.unlink(missing_ok=True)
    (folder / "consolidated.safetensors").write_bytes(b"the same weights again")
    (folder / "picture.png").write_bytes(b"a picture")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub(model=model) as hub:
        for name, value in (hub.environment | {"HF_HOME": str(tmp_path / "home")}).items():
            monkeypatch.setenv(name, value)
        # The library has read its variables when it was imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home/hub"))
        yield hub


def test_an_at_sign_in_a_folder_is_not_a_revision(tmp_path: Path):
    """An adapter's configuration names its base model by this."""
    (folder := tmp_path / "user@host" / "models" / "qwen").mkdir(parents=True)
    assert name_and_revision(str(folder)) == (str(folder), None)
    assert name_and_revision("Qwen/Qwen3-4B@main") == ("Qwen/Qwen3-4B", "main")
    assert name_and_revision("Qwen/Qwen3-4B") == ("Qwen/Qwen3-4B", None)


def test_a_model_is_downloaded_once_and_then_read_without_a_request(hub: LocalHub, model: Path):
    download(KEY, "tests/model", 60)
    shards = {file.name for file in model.glob("model-*.safetensors")}
    assert len(shards) >= 3 and shards <= set(hub.downloads())
    assert not {"picture.png", "consolidated.safetensors"} & set(hub.downloads())
    assert len(hub.downloads()) == len(set(hub.downloads()))
    num_requests = len(hub.requests)
    folder = local_folder("tests/model")
    assert tensor_shapes(folder) == tensor_shapes(str(model))
    pinned = seen_from_anywhere("tests/model")
    assert pinned == f"tests/model@{COMMIT}" and local_folder(pinned) == folder
    assert len(hub.requests) == num_requests
    download(KEY, "tests/model", 60)
    download(KEY, pinned, 60)
    assert len(hub.downloads()) == len(set(hub.downloads()))


def test_a_slow_download_ends_at_its_own_deadline_and_names_the_key(hub: LocalHub):
    hub.delay_s = 30
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        download(KEY, "tests/model", 6)
    assert time.monotonic() - started < 25
    message = str(caught.value)
    assert message.startswith(f"trainer.download_timeout_s is 6: {KEY}=tests/model was not downloaded within")
    assert re.search(r"\d MB of \d+\.\d MB in .*models--tests--model", message)
    hub.delay_s = 0
    before = hub.downloads()
    download(KEY, "tests/model", 60)
    assert "config.json" in before and "config.json" not in hub.downloads()[len(before) :]
    assert tensor_shapes(local_folder("tests/model"))


def test_progress_is_logged(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    hub.delay_s = 1.0
    monkeypatch.setattr(module, "REPORT_S", 0.0)
    with caplog.at_level(logging.INFO, "skyrl_train"):
        download(KEY, "tests/model", 60)
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        re.match(r"downloading tests/model: \d+\.\d MB( of \d+\.\d MB)? in \S+, \d+\.\d MB/s$", x) for x in lines
    )
    assert re.match(r"downloaded tests/model: \d+\.\d MB in \d+ s$", lines[-1])


def test_a_name_that_the_hub_does_not_have_is_an_error_with_the_key(hub: LocalHub):
    with pytest.raises(ValueError, match=f"{KEY} is tests/absent: it is neither a folder nor can it be downloaded"):
        download(KEY, "tests/absent", 60)


def test_a_model_that_was_not_downloaded_is_not_asked_for(hub: LocalHub):
    with pytest.raises(ValueError, match="neither a folder nor complete in this node's cache"):
        local_folder("tests/model")
    assert not hub.requests


def test_a_folder_is_used_unchanged(hub: LocalHub, model: Path):
    download(KEY, str(model), 1)
    assert local_folder(os.path.relpath(model)) == str(model) == seen_from_anywhere(os.path.relpath(model))
    assert not hub.requests
