"""What a run says about a server that it cannot use, and the calls of a weight update in each version of vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.engines.remote.client import ServerError, ServerUnreachableError
from skyrl_train.engines.remote.engine import RemoteEngine
from skyrl_train.engines.remote.facts import ServerUnsuitableError
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.fake_servers import PACKED, FakeServer, serving
from tests.support.settings import remote_settings
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer

VERSIONS = ["0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.32.0", "0.33.0", "0.34.1.dev12+gabc"]
GROUP = {"master_address": "10.0.0.1", "master_port": 1234, "world_size": 3, "rank_offset": 1, "bucket_bytes": 1 << 20}
NAMES = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 2]]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def talk(server: FakeServer, body: Callable[[RemoteEngine], Awaitable[Any]], tokenizer: str, **changes: Any) -> Any:
    """Run `body` with an engine that is connected to the server; `changes` go to the engine's settings."""

    async def main() -> Any:
        async with serving(server) as url:
            values = {"api_key": None, "model_dtype": "float32", "max_model_len": 64, "rpc_timeout_s": 5.0, **changes}
            backend = values.pop("weight_sync_backend", "vllm_nccl" if server.backend == "nccl" else "broadcast")
            engine = RemoteEngine(remote_settings(url=url, model_path=tokenizer, backend=backend, **values))
            try:
                await engine.start(waits_for_weights=False)
                return await body(engine)
            finally:
                await engine.shutdown()

    return asyncio.run(main())


async def nothing(engine: RemoteEngine) -> None:
    """Only connect."""


async def update(engine: RemoteEngine, version: int = 3, digests: dict[str, int] | None = None) -> None:
    await engine.begin_weight_update()
    await engine.update_weights(NAMES | {"index": 0})
    await engine.finish_weight_update(version, digests or {})
    await engine.resume()


@pytest.mark.parametrize(
    ("server", "settings", "expected"),
    [
        ({"version": "0.20.2"}, {}, r"runs vLLM 0\.20\.2.*Use vLLM 0\.26 or newer"),
        ({"version": "0.25.1"}, {}, r"runs vLLM 0\.25\.1"),
        ({"dev_mode": False}, {}, r"no /server_info .*VLLM_SERVER_DEV_MODE=1"),
        ({"api_key": "right"}, {"api_key": "wrong"}, r"rejects the API key: generator\.remote_api_key_env"),
        ({"api_key": "right"}, {}, r"rejects the API key"),
        ({"max_model_len": 32}, {}, r"--max-model-len is 32, and prompt and response may have 64"),
        ({"dtype": "bfloat16"}, {}, r"--dtype is bfloat16 and generator\.model_dtype is float32"),
        ({"logprobs_mode": "raw_logprobs"}, {}, r"--logprobs-mode processed_logprobs"),
        ({"override_generation_config": {"max_new_tokens": 3}}, {}, r"has max_new_tokens 3, which would cut"),
        ({"data_parallel_size": 2}, {}, r"one server per replica"),
        ({"backend": None}, {}, r"backend is None: start it with --weight-transfer-config '{\"backend\": \"skyrl\"}'"),
        ({"extension": ""}, {}, r"--worker-extension-cls skyrl_train\.engines\.vllm\.worker\.transfer\.SyncExtension"),
        ({"backend": "nccl"}, {"weight_sync_backend": "broadcast"}, r"generator\.weight_sync_backend=vllm_nccl"),
        (
            {"backend": "ipc"},
            {"weight_sync_backend": "vllm_nccl"},
            r"--weight-transfer-config '{\"backend\": \"nccl\"}",
        ),
    ],
)
def test_an_unsuitable_server_is_refused_with_the_cure(
    server: dict[str, Any], settings: dict[str, Any], expected: str, tokenizer: str
):
    with pytest.raises(ServerUnsuitableError, match=expected):
        talk(FakeServer(**{"version": "0.32.0", "tokenizer_path": tokenizer, **server}), nothing, tokenizer, **settings)


def test_all_that_is_wrong_with_a_server_is_said_at_once(tokenizer: str):
    server = FakeServer("0.29.0", tokenizer, dtype="float16", max_model_len=8, backend=None)
    with pytest.raises(ServerUnsuitableError, match=r"vLLM 0\.29\.0.*max-model-len.*dtype.*backend"):
        talk(server, nothing, tokenizer)


def test_a_server_with_another_vocabulary_is_refused(tokenizer: str, tmp_path: Path):
    other = chatml_tokenizer()
    other.add_tokens(["12", "an"])
    other.save_pretrained(tmp_path)
    with pytest.raises(ServerUnsuitableError, match="has another vocabulary than"):
        talk(FakeServer("0.32.0", str(tmp_path)), nothing, tokenizer)


def test_a_server_that_is_not_there_is_named(tokenizer: str):
    settings = remote_settings("http://127.0.0.1:9", None, tokenizer, "float32", 64, "broadcast")

    async def main() -> None:
        engine = RemoteEngine(settings)
        try:
            await engine.start(waits_for_weights=False)
        finally:
            await engine.shutdown()

    with pytest.raises(ServerUnreachableError, match=r"no connection to the vLLM server http://127\.0\.0\.1:9"):
        asyncio.run(main())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("openapi", [True, False], ids=["openapi", "hidden"])
def test_an_update_goes_through_in_every_version(version: str, openapi: bool, tokenizer: str):
    server = FakeServer(version, tokenizer, digests={"a": 2**64 - 1}, openapi=openapi)

    async def body(engine: RemoteEngine) -> None:
        await engine.init_weight_sync({"transport": "shm", "sender": "policy-0"})
        await update(engine, 3, {"a": 2**64 - 1})
        await update(engine, 4, {"a": 2**64 - 1})

    talk(server, body, tokenizer)
    assert not server.paused and not server.update_is_active
    assert server.bodies["/init_weight_transfer_engine"] == {
        "init_info": {"info": {"transport": "shm", "sender": "policy-0"}}
    }
    assert server.label == (None if server.number < (0, 27) else "4")
    released = "/shutdown_weight_transfer_engine" in server.calls
    assert released == (server.number >= (0, 32))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stock_server_learns_how_tensors_are_packed_where_its_version_asks(version: str, tokenizer: str):
    server = FakeServer(version, tokenizer, backend="nccl", extension="")

    async def body(engine: RemoteEngine) -> None:
        await engine.init_weight_sync(GROUP | {"transport": "vllm_nccl", "sender": "policy-0"})
        await update(engine)

    talk(server, body, tokenizer)
    assert server.packed == dict(zip(PACKED, (True, 1 << 20, 2), strict=True))
    assert "/collective_rpc" not in server.calls, "a stock server has no extension to ask"


def test_other_digests_than_sent_leave_the_server_paused_until_a_whole_update(tokenizer: str):
    server = FakeServer("0.32.0", tokenizer, digests={"a": 1})

    async def body(engine: RemoteEngine) -> None:
        await engine.init_weight_sync({"transport": "shm", "sender": "policy-0"})
        with pytest.raises(WeightSyncError, match="1 arrived with other bytes: a"):
            await update(engine, 3, {"a": 2})
        assert server.paused
        with pytest.raises(WeightSyncError, match="stays paused"):
            await engine.resume()
        server.faults = ["layer x did not get all its weights"]
        with pytest.raises(WeightSyncError, match="layer x did not"):
            await update(engine, 4, {"a": 1})
        server.faults = []
        await update(engine, 5, {"a": 1})
        assert not server.paused

    talk(server, body, tokenizer)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
@pytest.mark.parametrize("backend", ["skyrl", "nccl"])
def test_an_update_that_was_begun_and_not_finished_is_closed_by_the_next_run(
    version: str, backend: str, tokenizer: str
):
    server = FakeServer(version, tokenizer, backend=backend, update_is_active=True, paused=True, is_connected=True)

    async def body(engine: RemoteEngine) -> None:
        await engine.begin_weight_update()
        await engine.update_weights(NAMES | {"index": 0})
        await engine.finish_weight_update(1, {})
        await engine.resume()

    talk(server, body, tokenizer)
    assert not server.paused


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("is_new", [False, True], ids=["the same client", "a new client"])
def test_a_server_that_failed_to_receive_gets_nothing_into_half_loaded_layers(
    version: str, is_new: bool, tokenizer: str
):
    """A client that takes another's place, or belongs to the next run, knows nothing of the failure."""
    server = FakeServer(version, tokenizer, backend="nccl")
    info = GROUP | {"transport": "vllm_nccl", "sender": "policy-0"}

    async def fail(engine: RemoteEngine) -> None:
        await engine.init_weight_sync(info)
        server.fail_update = True
        with pytest.raises(WeightSyncError, match=r"served, could not load the weights .*lm_head.weight"):
            await update(engine)
        with pytest.raises(WeightSyncError, match="stays paused"):
            await engine.resume()
        assert server.paused and server.has_open_layers
        server.fail_update = False
        if not is_new:
            await keep_alive(engine)

    async def keep_alive(engine: RemoteEngine) -> None:
        await engine.init_weight_sync(info)
        await update(engine, 4)

    talk(server, fail, tokenizer)
    if is_new:
        talk(server, keep_alive, tokenizer)
    assert not server.paused and not server.has_mixed_layers


def test_a_held_prefix_cache_fails_the_update(tokenizer: str):
    server = FakeServer("0.32.0", tokenizer, cache_is_held=True)

    async def body(engine: RemoteEngine) -> None:
        await engine.init_weight_sync({"transport": "shm", "sender": "policy-0"})
        with pytest.raises(WeightSyncError, match="did not reset its prefix cache"):
            await update(engine)
        with pytest.raises(WeightSyncError, match="stays paused"):
            await engine.resume()

    talk(server, body, tokenizer)


def test_requests_say_every_parameter_and_wait_while_the_server_is_paused(tokenizer: str):
    server = FakeServer("0.32.0", tokenizer)
    params = SamplingParams(max_generate_length=8, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, stop=("x",), seed=5)

    async def ask(engine: RemoteEngine) -> dict[int, Generation]:
        found: dict[int, Generation] = {}
        async for finished in engine.generate_batch([(7, [4, 5, 6], params), (8, [9] * 60, params)]):
            found |= dict(finished)
        return found

    async def body(engine: RemoteEngine) -> dict[int, Generation]:
        await engine.init_weight_sync({"transport": "shm", "sender": "policy-0"})
        await engine.pause()
        waiting = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.1)
        assert "/v1/completions" not in server.calls
        await update(engine, 6)
        return await waiting

    found = talk(server, body, tokenizer)
    assert found[7] == Generation([6, 5, 4], [-3.0, -2.5, -2.0], "text", "length", 6)
    assert len(found[8].token_ids) == 4, "what is left of 64 tokens"
    sent = server.bodies["/v1/completions"]
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "stop": ["x"], "repetition_penalty": 1.0}
    assert sent["seed"] is None, "servers have GPUs, which sample seeded requests one by one"
    assert expected.items() <= sent.items() and sent["include_stop_str_in_output"] and sent["return_token_ids"]


@pytest.mark.parametrize(
    ("stop", "skips_special", "text"), [(("x",), True, "text"), (("x", "a<bos>"), False, "12")], ids=["text", "token"]
)
def test_a_server_searches_special_tokens_for_stop_strings_that_have_them(
    stop: tuple[str, ...], skips_special: bool, text: str, tokenizer: str
):
    server, prompt = FakeServer("0.32.0", tokenizer), tiny_tokenizer().encode("21<bos>", add_special_tokens=False)

    async def body(engine: RemoteEngine) -> Generation:
        await engine.init_weight_sync({"transport": "shm", "sender": "policy-0"})
        await update(engine)
        batch = engine.generate_batch([(0, prompt, SamplingParams(max_generate_length=8, stop=stop))])
        (generation,) = [one async for finished in batch for _, one in finished]
        return generation

    assert talk(server, body, tokenizer).text == text, "environments get no special tokens"
    assert server.bodies["/v1/completions"]["skip_special_tokens"] is skips_special


def test_a_prompt_without_room_to_answer_is_refused(tokenizer: str):
    async def body(engine: RemoteEngine) -> None:
        async for _ in engine.generate_batch([(0, [4] * 64, SamplingParams(max_generate_length=8))]):
            pass

    with pytest.raises(ValueError, match="a prompt of 64 tokens does not fit an engine of 64"):
        talk(FakeServer("0.32.0", tokenizer), body, tokenizer)


def test_a_server_that_goes_away_is_a_dead_engine(tokenizer: str):
    async def main() -> None:
        async with serving(FakeServer("0.32.0", tokenizer)) as url:
            engine = RemoteEngine(remote_settings(url, None, tokenizer, "float32", 64, "broadcast", 5.0))
            await engine.start(waits_for_weights=False)
        try:
            with pytest.raises(EngineDeadError, match=f"no connection to the vLLM server {url}"):
                async for _ in engine.generate_batch([(0, [4], SamplingParams(max_generate_length=8))]):
                    pass
            with pytest.raises(EngineDeadError):
                await engine.pause()
        finally:
            await engine.shutdown()

    asyncio.run(main())


def test_a_worker_without_the_extension_is_recognised(tokenizer: str):
    """The route's error reaches the caller with the server's words."""

    async def body(engine: RemoteEngine) -> None:
        await engine._rpc("skyrl_sync_report")

    server = FakeServer("0.29.0", tokenizer, backend="nccl", extension="")
    with pytest.raises(ServerError, match="500 Method 'skyrl_sync_report' is not implemented"):
        talk(server, body, tokenizer)
