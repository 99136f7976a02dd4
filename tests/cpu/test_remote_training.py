"""A run against a vLLM server that was started by hand, as docs/remote_engines.md says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.inference.remote import RemoteEngine
from skyrl_train.inference.settings import EXTENSION, EngineSettings, RemoteEngineSettings, engine_environment
from skyrl_train.ranks import free_port
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.digest import WeightSyncError
from tests.cpu.jobs import ROOT, run_to_end, write_world
from tests.cpu.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "of-the-test"
START_S = 200


@dataclass(frozen=True)
class Server:
    url: str
    world: Path

    def ask(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def settings(self) -> RemoteEngineSettings:
        return RemoteEngineSettings(self.url, KEY, str(self.world / "model"), "float32", 24, "broadcast", 60)


def command(model: Path, port: int) -> list[str]:
    """What docs/remote_engines.md tells to run on a CPU."""
    arguments = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 64,
        "kv-cache-memory-bytes": 64 << 20,
        "block-size": 32,
        "logprobs-mode": "processed_logprobs",
        "api-key": KEY,
        "weight-transfer-config": json.dumps({"backend": "skyrl"}),
        "worker-extension-cls": EXTENSION,
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It serves other weights than the run's model has at its start."""
    world = write_world(tmp_path_factory.mktemp("remote") / "world")
    other, port = write_tiny_model(world / "other", seed=1), free_port()
    environment = engine_environment(EngineSettings(str(other), "tiny", "float32", 64), "cpu")
    variables = os.environ | environment | {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1"}
    log = world / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(other, port), env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    found = Server(f"http://127.0.0.1:{port}", world)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            try:
                found.ask("/health")
                break
            except OSError:
                time.sleep(0.2)
        yield found
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def test_tokens_and_logprobs_of_a_server_are_those_of_its_model(server: Server):
    async def main() -> tuple[list[Generation], list[list[float]]]:
        engine = RemoteEngine(server.settings())
        assert await engine.ready() == {"num_workers": 1, "policy_version": 0}
        requests = [(n, [4 + n, 5, 6], SamplingParams(max_generate_length=8)) for n in range(6)]
        found: dict[int, Generation] = {}
        async for finished in engine.generate_batch(requests):
            found |= dict(finished)
        scored = await engine.prompt_logprobs([prompt + found[n].token_ids for n, prompt, _ in requests])
        await engine.shutdown()
        return [found[n] for n, _, _ in requests], scored

    generations, scored = asyncio.run(main())
    for n, (generation, logprobs) in enumerate(zip(generations, scored, strict=True)):
        expected = reference_logprobs(server.world / "other", [4 + n, 5, 6, *generation.token_ids])
        assert logprobs == pytest.approx(expected, abs=1e-5)
        assert generation.logprobs == pytest.approx(expected[3:], abs=1e-5)
        assert len(generation.token_ids) == 8 or generation.stop_reason == "stop"


def test_a_server_whose_update_broke_off_stays_paused(server: Server):
    async def main() -> None:
        engine = RemoteEngine(server.settings())
        await engine.ready()
        await engine.init_weight_sync({"transport": "shm", "sender": "one"})
        with pytest.raises(WeightSyncError, match="pause the engine before"):
            await engine.start_weight_update()
        await engine.pause()
        await engine.start_weight_update()
        with pytest.raises(WeightSyncError, match=r"could not take in the weights.*another"):
            await engine.update_weights({"transport": "shm", "sender": "another", "index": 0})
        with pytest.raises(WeightSyncError, match="stays paused"):
            await engine.resume()
        await engine.shutdown()

    asyncio.run(main())
    assert server.ask("/is_paused") == {"is_paused": True}


def test_a_run_trains_with_a_server_that_held_other_and_half_weights(server: Server):
    """Policy in two stages, each sending its own. Digests are compared at each sync, logprobs at each here."""
    code, job = run_to_end(
        server.world,
        "trainer.run_name=remote",
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=[{server.url}]",
        "generator.remote_api_key_env=KEY_OF_THE_TEST",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
        "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.verify_sync_every=1",
        "trainer.hf_save_interval=2",
        environment={"KEY_OF_THE_TEST": KEY},
    )
    assert code == 0, job.story()
    steps = job.metrics
    assert len(steps) == 2
    for step in steps:
        # Before its first update in a step the policy is what the server drew from.
        assert 0 < step["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert KEY not in "".join(path.read_text() for path in job.run_dir.glob("*.yaml"))

    version = server.ask("/weight_info")["weight_version"]
    assert int(version) == 4, "two steps of two mini-batches"
    assert server.ask("/is_paused") == {"is_paused": False}
    tokens = [4, 41, 6, 45, 20, 21, 22]
    export = job.run_dir / "exports/global_step_2"
    body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    rows = server.ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    served = [0.0] + [row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens[1:], strict=True)]
    assert served == pytest.approx(reference_logprobs(export, tokens), abs=1e-4)
    assert served != pytest.approx(reference_logprobs(server.world / "model", tokens), abs=1e-2)


def reference_logprobs(model: Path, tokens: list[int]) -> list[float]:
    """Of transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([tokens])).logits[0]
    return [0.0] + [float(logits[n - 1].log_softmax(0)[tokens[n]]) for n in range(1, len(tokens))]
