"""A run against a vLLM server that was started by hand, as docs/remote_engines.md says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_train.engines.remote.engine import RemoteEngine
from skyrl_train.engines.settings import EXTENSION, engine_environment
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.channels.channel import SendingEnd
from skyrl_train.weight_sync.channels.table import open_sender
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.jobs import run_to_end, write_world
from tests.support.remote_servers import KEY, Posted, Server, connect, vllm_server
from tests.support.sending import specs_of
from tests.support.settings import engine_settings, remote_settings
from tests.support.tiny import tiny_tokenizer, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("remote") / "world")


@pytest.fixture(scope="module")
def server(world: Path) -> Iterator[Server]:
    """It serves other weights than the run's model has at its start."""
    other = write_tiny_model(world / "other", seed=1)
    with vllm_server(
        other,
        world / "server.log",
        engine_environment(engine_settings(str(other), "tiny", "float32", 64), "cpu"),
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=json.dumps({"backend": "skyrl"}),
        worker_extension_cls=EXTENSION,
    ) as running:
        yield running.wait()


def engine_of(server: Server, world: Path) -> RemoteEngine:
    return RemoteEngine(remote_settings(server.url, KEY, str(world / "model"), "float32", 24, "broadcast", 60))


def test_tokens_and_logprobs_of_a_server_are_those_of_its_model(server: Server, world: Path):
    async def main() -> tuple[list[Generation], list[list[float]]]:
        engine = engine_of(server, world)
        assert (await engine.start(waits_for_weights=False)).num_workers == 1
        requests = [(n, [4 + n, 5, 6], SamplingParams(max_generate_length=8)) for n in range(6)]
        found: dict[int, Generation] = {}
        async for finished in engine.generate_batch(requests):
            found |= dict(finished)
        scored = await engine.prompt_logprobs([prompt + found[n].token_ids for n, prompt, _ in requests])
        await engine.shutdown()
        return [found[n] for n, _, _ in requests], scored

    generations, scored = asyncio.run(main())
    for n, (generation, logprobs) in enumerate(zip(generations, scored, strict=True)):
        expected = reference_logprobs(world / "other", [4 + n, 5, 6, *generation.token_ids])
        assert logprobs == pytest.approx(expected, abs=1e-5)
        assert generation.logprobs == pytest.approx(expected[3:], abs=1e-5)
        assert len(generation.token_ids) == 8 or generation.stop_reason == "stop"


def test_a_special_token_of_stop_ends_an_answer_of_a_server(server: Server, world: Path):
    params = SamplingParams(max_generate_length=20, temperature=2.0, stop=("<bos>",))

    async def main() -> list[Generation]:
        engine = engine_of(server, world)
        await engine.start(waits_for_weights=False)
        batch = engine.generate_batch([(n, [4, 5, 6], params) for n in range(128)])
        generations = [one async for finished in batch for _, one in finished]
        await engine.shutdown()
        return generations

    tokenizer, generations = tiny_tokenizer(), asyncio.run(main())
    ended = [one for one in generations if tokenizer.bos_token_id in one.token_ids]
    assert ended and all(one.token_ids.index(tokenizer.bos_token_id) == len(one.token_ids) - 1 for one in ended)
    assert all(one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in generations)


def test_a_server_whose_update_failed_stays_paused(server: Server, world: Path):
    async def main() -> None:
        engine = engine_of(server, world)
        await engine.start(waits_for_weights=False)
        loop = asyncio.get_running_loop()
        sender = open_sender(
            "shm",
            SendingEnd(lambda message: Posted(engine, message, loop), 1 << 20, 1, torch.device("cpu"), 60, "127.0.0.1"),
        )
        tensors = [("model.norm.weight", torch.ones(128)), ("model.nowhere.weight", torch.ones(4))]
        await connect(engine, sender, tensors)
        await engine.begin_weight_update()
        with pytest.raises(WeightSyncError, match=r"could not load the weights of .*nowhere"):
            await asyncio.to_thread(sender.send, specs_of(tensors), tensors)
        sender.close()
        with pytest.raises(WeightSyncError, match="stays paused"):
            await engine.resume()
        await engine.shutdown()

    asyncio.run(main())
    assert server.ask("/is_paused") == {"is_paused": True}


def test_a_run_trains_with_a_server_that_held_other_and_half_weights(server: Server, world: Path):
    """Policy in two stages, each sending its own. Digests are compared at each sync, logprobs at each here."""
    code, job = run_to_end(
        world,
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
        # Before its first update in a step the policy is what the server sampled from.
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
    assert served != pytest.approx(reference_logprobs(world / "model", tokens), abs=1e-2)


def reference_logprobs(model: Path, tokens: list[int]) -> list[float]:
    """Of transformers."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([tokens])).logits[0]
    return [0.0] + [float(logits[n - 1].log_softmax(0)[tokens[n]]) for n in range(1, len(tokens))]
