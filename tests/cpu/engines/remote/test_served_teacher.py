"""A running server as the teacher of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.engines.remote.client import ServerUnreachableError
from skyrl_train.engines.remote.facts import ServerUnsuitableError
from skyrl_train.engines.remote.scoring import ServedTeacher
from tests.support.fake_servers import FakeServer, serving
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def scores(server: FakeServer, tokenizer: str, max_model_len: int = 64) -> Any:
    async def main() -> Any:
        async with serving(server) as url:
            teacher = ServedTeacher(
                url,
                server.api_key,
                policy_path=tokenizer,
                trust_remote_code=False,
                max_model_len=max_model_len,
                timeout_s=5.0,
            )
            try:
                await teacher.start()
                return await teacher.prompt_logprobs([[5, 6, 7], [8]])
            finally:
                await teacher.shutdown()

    return asyncio.run(main())


def test_an_unmodified_server_scores_given_tokens(tokenizer: str):
    """It needs no development mode and no backend for weights."""
    server = FakeServer("0.26.0", tokenizer, backend=None, extension="", dev_mode=False, api_key="secret")
    assert scores(server, tokenizer) == [[0.0, -3.0, -3.5], [0.0]]
    assert server.bodies["/v1/completions"] == {
        "prompt": server.bodies["/v1/completions"]["prompt"],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def test_a_server_that_cannot_score_the_samples_is_refused_before_the_run(tokenizer: str, tmp_path: Path):
    other = chatml_tokenizer()
    other.add_tokens(["12", "an"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ServerUnsuitableError, match="--max-model-len 64: a sample may need 65"):
        scores(FakeServer("0.33.0", tokenizer), tokenizer, max_model_len=65)
    with pytest.raises(ServerUnsuitableError, match="another vocabulary"):
        scores(FakeServer("0.33.0", str(tmp_path)), tokenizer)
    gone = ServedTeacher(
        "http://127.0.0.1:9", None, policy_path=tokenizer, trust_remote_code=False, max_model_len=8, timeout_s=5.0
    )
    with pytest.raises(ServerUnreachableError, match="no connection to the vLLM server"):
        asyncio.run(gone.start())
