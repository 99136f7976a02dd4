"""A real vLLM engine on the CPU: generation, and weights that change while it runs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from skyrl_train.engines.protocol import EngineDeadError
from skyrl_train.rollout.contract import Engines
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.channels.broadcast import BroadcastSendChannel
from skyrl_train.weight_sync.channels.shm import ShmSendChannel
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.live_engine import (
    PROMPTS,
    TIMEOUT_S,
    Named,
    World,
    cmdline,
    greedy,
    live_world,
    run,
)
from tests.support.sending import specs_of
from tests.support.tiny import tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Other models, and tensors from a real trainer, are in tests/cpu/weight_sync/test_sync_proof.py."""
    yield from live_world(tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize("bucket_bytes", [1024, 70_000, 32 << 20])
def test_an_updated_engine_answers_as_the_new_checkpoint(world: World, bucket_bytes: int):
    run(world.sync(world.weights(0)))
    first = run(world.generate(PROMPTS))
    run(world.sync(world.weights(1), bucket_bytes))
    for prompt, generation in zip(PROMPTS, run(world.generate(PROMPTS)), strict=True):
        tokens, logprobs = greedy(world.models[1], prompt)
        assert generation.token_ids == tokens
        assert generation.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert generation.policy_version == world.version
    run(world.sync(world.weights(0), bucket_bytes))
    assert [(g.token_ids, g.logprobs) for g in run(world.generate(PROMPTS))] == [
        (g.token_ids, g.logprobs) for g in first
    ]


def test_a_broadcast_updates_the_engine_as_shared_memory_does(world: World):
    async def update() -> None:
        channel = BroadcastSendChannel(1, torch.device("cpu"), TIMEOUT_S)
        report = await world.send(world.weights(1), 50_000, channel)
        await world.engine.finish_weight_update(7, report.digests)
        await world.engine.resume()

    run(world.sync(world.weights(0)))
    run(update())
    assert run(world.answers()) == world.expected(1)


def test_a_repeated_prompt_is_computed_again_after_a_sync(world: World):
    long_prompt = [[4 + k % 50 for k in range(100)]]
    run(world.sync(world.weights(0)))
    run(world.generate(long_prompt))
    assert run(world.generate(long_prompt))[0].token_ids == greedy(world.models[0], long_prompt[0])[0]
    run(world.sync(world.weights(1)))
    (generation,) = run(world.generate(long_prompt))
    tokens, logprobs = greedy(world.models[1], long_prompt[0])
    assert generation.token_ids == tokens
    assert generation.logprobs == pytest.approx(logprobs, abs=1e-5)


def broken_off(world: World, named_tensors: Named, message: str | None, change: Callable[[dict], dict] = dict) -> None:
    """The sync fails with the message, the engine stays paused, and a whole sync heals it."""

    async def fail() -> None:
        report = await world.send(named_tensors, 4096)
        await world.engine.finish_weight_update(9, change(report.digests))

    run(world.sync(world.weights(0)))
    with pytest.raises(Exception, match=message):
        run(fail())
    with pytest.raises(WeightSyncError, match="stays paused"):
        run(world.engine.resume())
    run(world.sync(world.weights(1)))
    assert run(world.answers()) == world.expected(1)


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight",
                                  "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight",
                                  "model.norm.weight"])  # fmt: skip
def test_a_parameter_that_was_not_sent_is_named(world: World, lost: str):
    kept = [(name, tensor) for name, tensor in world.weights(1) if name != lost]
    layer = lost.removesuffix(".weight").replace("k_proj", "qkv_proj").replace("up_proj", "gate_up_proj")
    broken_off(world, kept, f"did not get all their weights: .*{layer}")


def test_a_tensor_that_the_engine_has_no_parameter_for_is_named(world: World):
    extra = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(16))
    broken_off(world, [*world.weights(1), extra], "belong to no parameter of the engine: .*inv_freq")


@pytest.mark.parametrize("position", [0, 2, 3, 6, 12])
def test_an_unknown_name_fails_the_update_wherever_it_comes(world: World, position: int):
    named_tensors = world.weights(1)
    named_tensors.insert(position, ("model.layers.0.mystery.weight", torch.zeros(4)))
    broken_off(world, named_tensors, "mystery")


def test_an_update_that_fails_ends_the_connections_of_all_its_senders(world: World):
    """A broadcast that is under way holds its group, threads and buffers."""

    async def fail() -> None:
        failing = await world.connect(BroadcastSendChannel(1, torch.device("cpu"), TIMEOUT_S), 4096, "one")
        idle = await world.connect(BroadcastSendChannel(1, torch.device("cpu"), TIMEOUT_S), 4096, "two")
        await world.engine.begin_weight_update()
        try:
            unknown = [("model.layers.0.mystery.weight", torch.zeros(4)), *world.weights(1)]
            await asyncio.to_thread(failing.send, specs_of(unknown), unknown)
        finally:
            failing.close()
            idle.close()

    run(world.sync(world.weights(0)))
    with pytest.raises(Exception, match="mystery"):
        run(fail())
    with pytest.raises(Exception, match="its connection was closed"):
        run(world.engine.begin_weight_update())
    with pytest.raises(WeightSyncError, match="stays paused"):
        run(world.engine.resume())
    run(world.sync(world.weights(1)))
    assert run(world.answers()) == world.expected(1)


def test_a_tensor_of_another_shape_fails_the_update(world: World):
    named_tensors = [(n, t[:-1] if n.endswith("1.mlp.down_proj.weight") else t) for n, t in world.weights(1)]
    broken_off(world, named_tensors, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sent: sent | {"model.norm.weight": sent["model.norm.weight"] ^ 1}, "other bytes: model.norm.weight"),
        (lambda sent: sent | {"model.ghost": 1}, "never arrived: model.ghost"),
        (lambda sent: {n: d for n, d in sent.items() if n != "model.norm.weight"}, "were not sent: model.norm.weight"),
    ],
)
def test_a_digest_that_differs_stops_the_sync(world: World, change: Callable[[dict], dict], message: str):
    broken_off(world, world.weights(1), message, change)


def test_a_name_that_arrives_twice_fails_the_update(world: World):
    async def twice() -> None:
        senders = [await world.connect(ShmSendChannel(1, TIMEOUT_S), 1 << 20, name) for name in ("one", "two")]
        await world.engine.begin_weight_update()
        part = world.weights(1)[:3]
        try:
            for sender in senders:
                await asyncio.to_thread(sender.send, specs_of(part), part)
        finally:
            for sender in senders:
                sender.close()

    with pytest.raises(Exception, match="arrived twice"):
        run(twice())
    run(world.sync(world.weights(1)))
    assert run(world.answers()) == world.expected(1)


def test_requests_wait_while_the_engine_is_paused_and_frozen_ones_continue(world: World):
    async def main() -> None:
        long = SamplingParams(max_generate_length=100, temperature=1.0)
        running = asyncio.create_task(world.generate(PROMPTS[:1] * 4, long))
        while world.num_running == 0:
            await asyncio.sleep(0.002)
        await world.sync(world.weights(1))
        await world.engine.pause()
        waiting = asyncio.create_task(world.generate(PROMPTS))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await world.engine.resume()
        assert [generation.token_ids for generation in await waiting] == world.expected(1)
        for generation in await running:
            assert generation.stop_reason in ("stop", "length")
            assert generation.version_spans[-1][0] == world.version
            assert generation.policy_version == generation.version_spans[0][0]

    run(world.sync(world.weights(0)))
    run(main())


def test_aborting_ends_running_requests_with_what_they_have(world: World):
    async def main() -> list[Generation]:
        long = SamplingParams(max_generate_length=120, temperature=1.0)
        running = asyncio.create_task(world.generate(PROMPTS[:1] * 64, long))
        await until_tokens_came(world)
        await world.engine.pause("abort")
        await world.engine.resume()
        return await running

    generations = run(main())
    assert any(one.stop_reason == "abort" and one.token_ids for one in generations)
    whole = [PROMPTS[0] + one.token_ids for one in generations]
    scores = run(world.engine.prompt_logprobs(whole))
    for one, score in zip(generations, scores, strict=True):
        assert one.logprobs == pytest.approx(score[len(PROMPTS[0]) :], abs=2e-5)


def test_a_response_that_a_sync_aborts_continues_from_its_tokens_with_the_new_weights(world: World):
    run(world.sync(world.weights(0)))
    params, prompt, first = SamplingParams(max_generate_length=120, temperature=0.0), PROMPTS[0], world.version

    async def generate(token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        return (await world.generate([token_ids], params))[0]

    engines = Engines(generate, tiny_tokenizer(), None, max_input_length=len(prompt), max_turns=1)  # type: ignore[arg-type]

    async def main() -> list[Generation]:
        running = [asyncio.create_task(engines.generate(prompt, params, "a")) for _ in range(64)]
        await until_tokens_came(world)
        await world.engine.pause("abort")
        await world.sync(world.weights(1))
        return await asyncio.gather(*running)

    generations = run(main())
    cut = [one for one in generations if len(one.version_spans) > 1]
    assert cut, "some had tokens when they were aborted"
    for one in cut:
        (before, count), (after, rest) = one.version_spans
        assert (before, after) == (first, world.version) and count + rest == len(one.token_ids) == len(one.logprobs)
    scores = run(world.engine.prompt_logprobs([prompt + one.token_ids for one in cut]))
    for one, score in zip(cut, scores, strict=True):
        count, start = one.version_spans[0][1], len(prompt)
        assert one.logprobs[count:] == pytest.approx(score[start + count :], abs=2e-5), "read and written again"
        assert one.logprobs[:count] != pytest.approx(score[start : start + count], abs=2e-5), "of the old weights"


async def until_tokens_came(world: World) -> Any:
    """Waits until a request has some; returns what the front end knows of each request."""
    states: Any = world.engine._core.llm.output_processor.request_states
    while not any(state.detokenizer.num_output_tokens() > 2 for state in states.values()):
        await asyncio.sleep(0.002)
    return states


@pytest.mark.parametrize("stop", [(), ("<never>",)], ids=["ended by the core", "ended by the front end"])
def test_logprobs_come_at_the_end_where_nobody_reads_them_before(world: World, stop: tuple[str, ...]):
    async def main() -> tuple[list[tuple[int, int]], list[Generation]]:
        params = SamplingParams(max_generate_length=100, stop=stop)
        running = asyncio.create_task(world.generate(PROMPTS, params))
        states = await until_tokens_came(world)
        await world.engine.pause("keep")
        found = [(s.detokenizer.num_output_tokens(), len(s.logprobs_processor.logprobs)) for s in states.values()]
        await world.engine.resume()
        return found, await running

    counts, generations = run(main())
    assert counts and all(logprobs == (tokens if stop else 0) for tokens, logprobs in counts)
    assert all(len(one.logprobs) == len(one.token_ids) for one in generations)


def test_leaving_a_batch_frees_its_requests(world: World):
    async def main() -> None:
        task = asyncio.create_task(world.generate(PROMPTS * 16, SamplingParams(max_generate_length=120)))
        while world.num_running == 0:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait({task})
        assert world.num_running == 0

    run(main())


def test_logprobs_are_of_the_sampled_token_under_its_distribution(world: World):
    run(world.sync(world.weights(1)))
    params = SamplingParams(max_generate_length=6, temperature=0.7, top_p=0.9, top_k=20)
    for prompt, generation in zip(PROMPTS * 4, run(world.generate(PROMPTS * 4, params)), strict=True):
        with torch.no_grad():
            logits = world.models[1](torch.tensor([prompt + generation.token_ids])).logits[0]
        for position, (token, logprob) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
            row = logits[len(prompt) - 1 + position] / 0.7
            row = row.masked_fill(row < row.topk(20).values[-1], -torch.inf)
            ordered, order = row.softmax(-1).sort(descending=True)
            before = ordered.cumsum(0) - ordered
            # A sum may be 0.9 up to rounding, which then decides whether its token is among the others.
            rows = [row.index_fill(0, order[before >= bound], -torch.inf) for bound in (0.9 - 1e-5, 0.9 + 1e-5)]
            assert min(abs(logprob - float(one.log_softmax(-1)[token])) for one in rows) < 2e-5


def test_a_seed_decides_the_tokens_of_a_request_whatever_else_the_engine_samples(world: World):
    unseeded = SamplingParams(max_generate_length=20, temperature=1.0, stop=("zzz",))
    seeded = [replace(unseeded, seed=2**62 + n) for n in range(4)]

    async def sampled(params: list[SamplingParams], order: list[int]) -> list[list[int]]:
        found: dict[int, Generation] = {}
        async for finished in world.engine.generate_batch([(n, PROMPTS[n % 4], params[n]) for n in order]):
            found |= dict(finished)
        return [found[n].token_ids for n in sorted(order)]

    together = run(sampled(seeded, [0, 1, 2, 3]))
    assert run(sampled([*seeded, unseeded, unseeded], [4, 3, 1, 5, 2, 0]))[:4] == together
    assert [run(sampled(seeded, [n]))[0] for n in range(4)] == together
    assert run(sampled([unseeded] * 4, [0, 1, 2, 3])) != run(sampled([unseeded] * 4, [0, 1, 2, 3]))


def test_prompt_logprobs_are_those_of_hugging_face(world: World):
    run(world.sync(world.weights(1)))
    for prompt, logprobs in zip(PROMPTS, run(world.engine.prompt_logprobs(PROMPTS)), strict=True):
        with torch.no_grad():
            rows = world.models[1](torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [0.0] + [float(rows[k, prompt[k + 1]]) for k in range(len(prompt) - 1)]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_a_stop_string_ends_the_generation_and_stays_in_tokens_and_text(world: World):
    tokenizer = tiny_tokenizer()
    run(world.sync(world.weights(1)))
    params = SamplingParams(max_generate_length=60, temperature=0.0)
    whole = next(g for g in run(world.generate(PROMPTS, params)) if len(g.token_ids) > 6)
    prompt = PROMPTS[[g.token_ids for g in run(world.generate(PROMPTS, params))].index(whole.token_ids)]
    text = tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    stop = text[3:5]
    (stopped,) = run(world.generate([prompt], SamplingParams(max_generate_length=60, temperature=0.0, stop=(stop,))))
    assert stopped.stop_reason == "stop"
    assert stopped.text == tokenizer.decode(stopped.token_ids, skip_special_tokens=True)
    assert stopped.text == text[: text.index(stop) + len(stop)]
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_a_stop_string_that_is_a_special_token_ends_the_generation_and_is_no_text(world: World):
    params = SamplingParams(max_generate_length=60, temperature=2.0, stop=("<bos>",))
    tokenizer, generations = tiny_tokenizer(), run(world.generate(PROMPTS * 16, params))
    ended = [one for one in generations if tokenizer.bos_token_id in one.token_ids]
    assert ended, "no sample of 64 has the token"
    for one in ended:
        assert one.token_ids.index(tokenizer.bos_token_id) == len(one.token_ids) - 1 and one.stop_reason == "stop"
    assert all(one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in generations)


def test_the_end_of_sequence_is_a_token_but_no_text(world: World):
    params = SamplingParams(max_generate_length=100, temperature=1.0)
    ended = [g for g in run(world.generate(PROMPTS * 16, params)) if g.stop_reason == "stop"]
    assert ended, "no sample of 64 ended by itself"
    for generation in ended:
        assert generation.token_ids[-1] == 1 and "<eos>" not in generation.text


def test_the_engine_stops_at_its_longest_sequence(world: World):
    prompt = [5] * 120
    (generation,) = run(world.generate([prompt], SamplingParams(max_generate_length=100, temperature=0.0)))
    assert len(generation.token_ids) <= 8
    with pytest.raises(ValueError, match="max_prompt_length"):
        run(world.generate([[5] * 128]))


def test_many_requests_come_back_in_few_messages(world: World):
    async def main() -> int:
        requests = [(n, PROMPTS[n % 4], SamplingParams(max_generate_length=4)) for n in range(512)]
        sizes = [len(finished) async for finished in world.engine.generate_batch(requests)]
        assert sum(sizes) == 512
        return len(sizes)

    assert run(main()) <= 40


def test_a_sleeping_engine_answers_nothing_until_it_is_awake_with_new_weights(world: World):
    async def main() -> None:
        await world.sync(world.weights(0))
        long = SamplingParams(max_generate_length=100, temperature=1.0)
        running = asyncio.create_task(world.generate(PROMPTS[:1] * 4, long))
        while world.num_running == 0:
            await asyncio.sleep(0.002)
        await world.engine.sleep()
        await world.engine.sleep()  # nothing to do
        waiting = asyncio.create_task(world.generate(PROMPTS))
        with pytest.raises(WeightSyncError, match="wake the engine's weights"):
            await world.engine.begin_weight_update()
        await world.engine.wake_weights()
        with pytest.raises(WeightSyncError, match="wake and update them first"):
            await world.engine.wake_kv_cache()
        await world.sync(world.weights(1))
        await asyncio.sleep(0.5)
        assert not waiting.done() and not running.done(), "the KV cache is still asleep"
        assert world.engine._asleep == {"kv_cache"}
        await world.engine.wake_kv_cache()
        assert [generation.token_ids for generation in await waiting] == world.expected(1)
        assert {len(generation.token_ids) > 0 for generation in await running} == {True}
        assert not world.engine._asleep

    run(main())


def test_an_engine_that_keeps_its_weights_wakes_without_an_update(world: World):
    async def main() -> None:
        await world.sync(world.weights(0))
        await world.engine.sleep(keep_weights=True)
        await world.engine.wake_weights()
        await world.engine.wake_kv_cache()
        assert await world.answers() == world.expected(0)
        await world.engine.sleep(keep_weights=True)
        await world.engine.wake_weights()
        await world.engine.sleep()  # from half awake
        await world.engine.wake_weights()
        await world.sync(world.weights(1))
        await world.engine.wake_kv_cache()
        assert await world.answers() == world.expected(1)
        (memory,) = await world.engine.memory()
        assert 0 < memory["allocated"] < memory["total"]

    run(main())


def test_a_dead_core_fails_waiting_requests(world: World, caplog: pytest.LogCaptureFixture):
    """The last test of a world: its engine is gone afterwards."""

    async def main() -> float:
        task = asyncio.create_task(world.generate(PROMPTS * 64, SamplingParams(max_generate_length=120)))
        while world.num_running == 0:
            await asyncio.sleep(0.002)
        for process in psutil.Process().children(recursive=True):
            if "EngineCore" in process.name() or "spawn_main" in " ".join(cmdline(process)):
                process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDeadError):
            await task
        waited = time.monotonic() - killed
        with pytest.raises(EngineDeadError):
            await world.engine.pause()
        return waited

    assert run(main()) < 30
    caplog.clear()  # pytest keeps what vLLM logged, an error with all that its frames hold
