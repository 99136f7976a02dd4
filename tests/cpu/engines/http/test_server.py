"""The HTTP endpoint of a real engine, while its weights change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import psutil
import pytest
import torch

from skyrl_train.types import SamplingParams, VersionSpans
from tests.support.live_engine import PROMPTS, World, cmdline, live_world, run
from tests.support.settings import changed

pytestmark = pytest.mark.slow
LONG = 300
NUM_SYNCS = 10


@dataclass(frozen=True)
class Told:
    """One answer, as its client sees it."""

    kind: str
    status: int
    model: str
    prompt: list[int]
    token_ids: list[int]
    spans: VersionSpans
    policy_versions: list[int]
    finish_reason: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # As a user's shell may have it.
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_API_KEY", "another-key")
        yield from live_world(
            tmp_path_factory.mktemp("served"),
            enable_http_endpoint=True,
            http_endpoint_port=0,
            max_model_len=LONG + 50,
        )


def client(url: str, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, headers=headers, verify=False)


def request(kind: str, prompt: list[int], model: str = "tiny", max_tokens: int = LONG) -> tuple[str, dict[str, Any]]:
    """Path and body; greedy, and with the tokens of prompt and answer in it."""
    common = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    common["stream"] = kind.startswith("streamed")
    if kind.endswith("chat"):
        text = "".join(str(token % 10) for token in prompt)
        return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", common | {"prompt": prompt}


async def ask(http: httpx.AsyncClient, kind: str, prompt: list[int], **more: Any) -> Told:
    path, body = request(kind, prompt, **more)
    if not body["stream"]:
        response = await http.post(path, json=body)
        found = response.json()
        assert response.status_code == 200, found
        told = from_chunks(kind, response.status_code, [found])
        assert response.headers["x-policy-versions"] == ",".join(map(str, told.policy_versions))
        return told
    chunks = []
    async with http.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line.removeprefix("data: ")))
    return from_chunks(kind, response.status_code, chunks)


def from_chunks(kind: str, status: int, chunks: list[dict[str, Any]]) -> Told:
    errors = [chunk for chunk in chunks if "choices" not in chunk]
    assert not errors, errors
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompts = [found for one in (*chunks, *choices) if (found := one.get("prompt_token_ids"))]
    return Told(
        kind,
        status,
        chunks[0]["model"],
        prompts[0],
        [token for choice in choices for token in choice.get("token_ids") or ()],
        tuple((version, count) for version, count in choices[-1]["version_spans"]),
        chunks[-1]["policy_versions"],
        choices[-1]["finish_reason"],
    )


class Versions:
    """Weights that differ from version to version, and what Hugging Face makes of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._of: dict[int, dict[str, torch.Tensor]] = {}

    async def publish(self) -> None:
        """Sync other weights into the engine."""
        generator = torch.Generator().manual_seed(self._world.version)
        named = [
            (name, tensor + 0.02 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in self._world.weights(1)
        ]
        await self._world.sync(named)
        self._of[self._world.version] = dict(named)

    @torch.no_grad()
    def are_true(self, prompt: list[int], token_ids: list[int], spans: VersionSpans) -> bool:
        """Whether each token is the one that its version samples greedily, given all before it."""
        assert sum(count for _, count in spans) == len(token_ids)
        model, position = self._world.models[1], len(prompt)
        for version, count in spans:
            own = torch.func.functional_call(
                model, self._of[version], (torch.tensor([prompt + token_ids]),), tie_weights=True
            )
            rows = own.logits[0, position - 1 : position - 1 + count]
            sampled = torch.tensor(token_ids)[position - len(prompt) :][:count]
            position += count
            # The likeliest, or as likely but for rounding.
            if bool((rows.amax(-1) - rows.gather(-1, sampled[:, None])[:, 0] > 1e-4).any()):
                return False
        return True


async def working(world: World, *awaitables: Any, num: int | None = None) -> list[asyncio.Task[Any]]:
    """A task each; the engine has sampled tokens of all their `num` requests (None: as many as tasks)."""
    tasks = [asyncio.create_task(awaitable) for awaitable in awaitables]
    states = world.engine._core.llm.output_processor.request_states
    while sum(state.detokenizer.num_output_tokens() > 0 for state in states.values()) < (num or len(tasks)):
        assert not any(task.done() for task in tasks), "a request ended before the others had begun"
        await asyncio.sleep(0.002)
    return tasks


KINDS = ("completions", "streamed completions", "chat", "streamed chat")


def test_requests_take_no_sampling_defaults_from_the_models_folder_and_say_what_was_applied(world: World):
    """Its generation_config.json says top_k=1: every answer would be the same token."""

    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1, "n": 30, "seed": 7, "return_token_ids": True}
        async with client(world.url) as http:  # type: ignore[attr-defined]
            plain = await http.post("/v1/completions", json=body)
            shaped = await http.post("/v1/completions", json=body | {"top_p": 0.5, "logit_bias": {"5": 1}, "n": 1})
        return plain.json(), shaped.json()

    plain, shaped = run(main())
    assert len({tuple(choice["token_ids"]) for choice in plain["choices"]}) > 5
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    assert plain["sampling_params"] == neutral
    assert shaped["sampling_params"] == neutral | {"top_p": 0.5, "logit_bias": True}


def test_direct_requests_take_no_sampling_defaults_from_the_models_folder(world: World):
    found = run(world.generate([PROMPTS[0]] * 30, SamplingParams(max_generate_length=1, temperature=1.0)))
    assert len({tuple(generation.token_ids) for generation in found}) > 5


def test_a_stream_of_requests_during_ten_syncs_fails_none_and_names_the_version_of_every_token(world: World):
    versions = Versions(world)

    async def client_of(kind: str, prompt: list[int], told: list[Told], is_open: asyncio.Event) -> None:
        async with client(world.url) as http:
            while is_open.is_set():
                told.append(await ask(http, kind, prompt))

    async def main() -> list[Told]:
        told: list[Told] = []
        is_open = asyncio.Event()
        is_open.set()
        await versions.publish()
        tasks = [asyncio.create_task(client_of(k, p, told, is_open)) for k in KINDS for p in PROMPTS[:2]]
        async with client(world.url) as http:
            for _ in range(NUM_SYNCS):
                await asyncio.sleep(0.1)
                told.append(await ask(http, "completions", PROMPTS[3]))  # so that each version samples something
                await versions.publish()
        is_open.clear()
        await asyncio.gather(*tasks)
        return told

    first = world.version + 1
    told = run(main())
    assert {one.kind for one in told if len(one.spans) > 1} == set(KINDS), "no request of each kind crossed a sync"
    assert {version for one in told for version in one.policy_versions} == set(range(first, first + NUM_SYNCS + 1))
    for one in told:
        named = [version for version, _ in one.spans]
        assert named == sorted(set(named)) == one.policy_versions
        assert int(one.model.removeprefix("tiny@")) <= named[0]
        assert len(one.token_ids) == LONG and one.finish_reason == "length"
    differing = {(tuple(one.prompt), tuple(one.token_ids), one.spans): one for one in told}.values()
    for one in differing:
        assert versions.are_true(one.prompt, one.token_ids, one.spans), one
    later = [replace(one, spans=one_token_later(one.spans)) for one in differing if len(one.spans) > 1]
    lies = [one for one in later if not versions.are_true(one.prompt, one.token_ids, one.spans)]
    assert lies, "the check does not see spans that begin one token late"


def one_token_later(spans: VersionSpans) -> VersionSpans:
    (first, count), (second, rest), *others = spans
    return ((first, count + 1), (second, rest - 1), *others)


@pytest.mark.parametrize("native", [True, False])
def test_generations_that_ran_across_syncs_report_every_version_and_the_lowest(world: World, native: bool):
    """Also where vLLM does not tell (0.26), and for samples of one request."""
    from skyrl_train.engines.vllm.compat import REPORTS_VERSIONS

    if native and not REPORTS_VERSIONS:
        pytest.skip("this vLLM does not tell versions")
    versions = Versions(world)
    tracker = world.engine._versions
    before, tracker._native = tracker._native, native

    async def main() -> tuple[list[Any], Told]:
        await versions.publish()
        params = SamplingParams(max_generate_length=LONG, temperature=0.0)
        async with client(world.url) as http:
            requests = world.generate(PROMPTS, params), ask(http, "streamed chat", PROMPTS[0])
            own, streamed = await working(world, *requests, num=len(PROMPTS) + 1)
            await versions.publish()
            await versions.publish()  # nothing may be sampled between these two
            await asyncio.sleep(0.05)
            await versions.publish()
            return await own, await streamed

    try:
        generations, streamed = run(main())
    finally:
        tracker._native = before
    for prompt, one in zip(PROMPTS, generations, strict=True):
        assert versions.are_true(prompt, one.token_ids, one.version_spans)
        assert one.policy_version == min(version for version, _ in one.version_spans)
    assert max(len(one.version_spans) for one in generations) > 1
    assert versions.are_true(streamed.prompt, streamed.token_ids, streamed.spans) and len(streamed.spans) > 1
    assert not tracker._starts


def test_names_move_with_the_version_and_the_old_one_is_not_found(world: World):
    async def main() -> None:
        async with client(world.url) as http:
            for _ in range(2):
                await world.sync(world.weights(0))
                now = f"tiny@{world.version}"
                assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [now, "tiny"]
                for name in (now, "tiny"):
                    assert (await ask(http, "completions", PROMPTS[0], model=name)).model == now
                gone = await post(http, "completions", model=f"tiny@{world.version - 1}")
                assert gone.status_code == 404 and gone.json()["error"]["type"] == "NotFoundError"

    run(main())


async def post(http: httpx.AsyncClient, kind: str, **more: Any) -> httpx.Response:
    path, body = request(kind, PROMPTS[0], **more)
    return await http.post(path, json=body)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_new_requests_wait_through_every_kind_of_pause_and_running_ones_end_as_it_says(world: World, mode: Any):
    settings = world.engine._settings
    versions = Versions(world)

    async def main() -> tuple[Told, Told]:
        await versions.publish()
        async with client(world.url) as http:
            (running,) = await working(world, ask(http, "chat", PROMPTS[0]))
            await world.engine.pause()
            waiting = asyncio.create_task(ask(http, "completions", PROMPTS[1]))
            await asyncio.sleep(0.3)
            assert not waiting.done() and (await http.get("/health")).status_code == 200
            assert running.done() == (mode != "keep")
            await versions.publish()
            return await running, await waiting

    world.engine._settings = settings.changed(pause_mode=mode)
    try:
        running, waited = run(main())
    finally:
        world.engine._settings = settings
    new = world.version
    assert [version for version, _ in waited.spans] == [new] and waited.model == f"tiny@{new}"
    assert running.finish_reason == ("abort" if mode == "abort" else "length")
    assert [version for version, _ in running.spans] == ([new - 1, new] if mode == "keep" else [new - 1])
    for one in (running, waited):
        assert versions.are_true(one.prompt, one.token_ids, one.spans)


def test_a_pause_that_takes_too_long_is_an_error_of_its_own(world: World):
    settings = world.engine._settings

    async def main() -> httpx.Response:
        await world.engine.pause()
        world.engine._settings = replace(settings, rpc_timeout_s=0.5)
        async with client(world.url) as http:
            return await post(http, "completions")

    try:
        response = run(main())
    finally:
        world.engine._settings = settings
        run(world.engine.resume())
    assert response.status_code == 503 and response.json()["error"]["type"] == "EnginePaused"


def test_many_choices_and_prompts_are_distinguished_and_beams_are_not(world: World):
    versions = Versions(world)

    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        await versions.publish()
        body = {"model": "tiny", "prompt": PROMPTS[:2], "n": 2, "max_tokens": LONG, "return_token_ids": True}
        beams = {"model": "tiny", "prompt": PROMPTS[0], "n": 2, "max_tokens": 4, "use_beam_search": True}
        async with client(world.url) as http:
            (asked,) = await working(world, http.post("/v1/completions", json=body | {"ignore_eos": True}), num=4)
            await versions.publish()
            return (await asked).json(), (await http.post("/v1/completions", json=beams)).json()

    found, beams = run(main())
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    for one in found["choices"]:
        assert sum(count for _, count in one["version_spans"]) == len(one["token_ids"]) == LONG
    named = {version for one in found["choices"] for version, _ in one["version_spans"]}
    assert sorted(named) == found["policy_versions"] == [world.version - 1, world.version]
    assert beams["policy_versions"] == [world.version]
    assert all("version_spans" not in one for one in beams["choices"])


def another_server(world: World, **http: Any) -> Any:
    from skyrl_train.engines.vllm.http.server import HttpServer

    engine = world.engine
    settings = changed(engine._settings, **http)
    return HttpServer(settings, engine._core.llm, engine._versions, engine._until_running)


@pytest.mark.parametrize("path", ["/collective_rpc", "/pause", "/sleep", "/reset_prefix_cache", "/update_weights"])
def test_calls_that_control_an_engine_are_not_served_whatever_it_inherits(world: World, path: str):
    async def play() -> int:
        async with client(world.url) as http:  # type: ignore[attr-defined]
            return (await http.post(path, json={})).status_code

    assert run(play()) == 404


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
def test_a_body_longer_than_any_the_model_takes_is_refused(world: World, path: str):
    async def play() -> httpx.Response:
        async with client(world.url) as http:  # type: ignore[attr-defined]
            return await http.post(path, json={"model": "tiny", "prompt": "1" * (5 << 20)})

    refused = run(play())
    assert refused.status_code == 413 and refused.json()["error"]["type"] == "RequestTooLarge"


def test_the_key_is_asked_for(world: World):
    async def main() -> list[int]:
        server = another_server(world, http_endpoint_host="0.0.0.0", http_api_key="secret", advertised_host="127.0.0.1")
        url = await server.start(world.version)
        statuses = []
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret"}):
            async with client(url, **headers) as http:
                statuses.append((await http.get("/v1/models")).status_code)
        await server.stop()
        return statuses

    assert run(main()) == [401, 401, 200]


def test_a_port_that_is_taken_is_an_error_that_says_so(world: World):
    with pytest.raises(ValueError, match="cannot listen on .* Set generator.http_endpoint_port to another port"):
        run(another_server(world, http_endpoint_port=int(world.url.rsplit(":")[-1])).start(0))


def test_of_two_that_start_together_one_gets_the_port():
    from skyrl_train.engines.vllm.http.server import _listen

    with (
        contextlib.closing(_listen("127.0.0.1", 0)) as first,
        pytest.raises(ValueError, match="cannot listen on"),
    ):
        _listen("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("starts", "num_tokens", "expected"),
    [
        ([(3, 0)], 5, ((3, 5),)),
        ([(3, 0), (4, 2), (5, 4)], 6, ((3, 2), (4, 2), (5, 2))),
        # A stop string takes back the tokens of version 5, then half of those of version 4 as well.
        ([(3, 0), (4, 2), (5, 4)], 4, ((3, 2), (4, 2))),
        ([(3, 0), (4, 2), (5, 4)], 3, ((3, 2), (4, 1))),
        ([(3, 0), (4, 2)], 1, ((3, 1),)),
        ([(3, 0), (4, 0)], 2, ((4, 2),)),
        ([(3, 0), (4, 0)], 0, ((4, 0),)),
    ],
)
def test_tokens_that_a_stop_string_takes_back_are_no_versions(starts: Any, num_tokens: int, expected: Any):
    from skyrl_train.engines.vllm.versions import spans_of

    assert spans_of(starts, num_tokens) == expected


def is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_server_that_is_stopped_frees_its_port_and_keeps_no_client_waiting(world: World):
    async def main() -> float:
        server = another_server(world)
        url = await server.start(world.version)
        await world.engine.pause()  # so that the request cannot end by itself
        async with client(url) as http:
            task = asyncio.create_task(ask(http, "streamed chat", PROMPTS[0]))
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            await server.stop()
            with pytest.raises(Exception):  # noqa: B017 (whichever way httpx says that it was cut off)
                await asyncio.wait_for(task, 60)
        assert is_free(int(url.rsplit(":")[-1]))
        await world.engine.resume()
        return time.monotonic() - begin

    assert run(main()) < 60


def test_a_dead_core_fails_running_and_waiting_requests_and_the_port_is_free_after_shutdown(
    world: World, caplog: pytest.LogCaptureFixture
):
    """The last test: the engine is gone afterwards."""

    async def attempt(kind: str) -> str:
        async with client(world.url) as http:
            path, body = request(kind, PROMPTS[0])
            try:
                async with http.stream("POST", path, json=body) as response:
                    text = (await response.aread()).decode()
                    return "error" if response.status_code >= 500 or '"error"' in text else text
            except httpx.HTTPError:
                return "error"

    async def main() -> float:
        tasks = await working(world, attempt("completions"), attempt("streamed chat"))
        await world.engine.pause()
        tasks.append(asyncio.create_task(attempt("completions")))
        await asyncio.sleep(0.2)
        for process in psutil.Process().children(recursive=True):
            if "EngineCore" in process.name() or "spawn_main" in " ".join(cmdline(process)):
                process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        ended = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert ended == ["error"] * 3
        return time.monotonic() - killed

    waited = run(main())
    run(world.engine.shutdown())
    assert is_free(int(world.url.rsplit(":")[-1]))
    assert waited < 30
    caplog.clear()  # pytest keeps what uvicorn logged, an error with all that its frames hold
