"""A real vLLM engine that serves an adapter which the weight sync brings, and says so when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from skyrl_train.engines.vllm.engine import VllmEngine
from skyrl_train.hf.adapter import identity_adapter
from skyrl_train.types import SamplingParams
from skyrl_train.weight_sync.channels.shm import ShmSendChannel
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.transport import Sender
from tests.support.adapters import lora_config, peft_model, read_adapter, write_adapter
from tests.support.live_engine import TIMEOUT_S, Posted, run
from tests.support.sending import specs_of
from tests.support.settings import MIB, engine_settings
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PROMPTS = [[4 + (7 * n + k) % 50 for k in range(20 + n)] for n in range(4)]
GREEDY = SamplingParams(max_generate_length=8, temperature=0.0)


class World:
    """An engine and the sending end of its adapters."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.model, self.version = model, 0
        self.engine = VllmEngine(
            engine_settings(
                model_path=str(model),
                served_model_name="tiny",
                **{"model_dtype": "float32"} | settings,
                max_model_len=128,
                kv_cache_memory_gb=64 * MIB,
                lora=lora_config(),
                engine_init_kwargs={
                    "block_size": 32,
                    "worker_extension_cls": "tests.support.faulty_worker.FaultySlots",
                },
            )
        )

    async def sync(self, tensors: dict[str, torch.Tensor]) -> int:
        """Returns: tensors sent and received."""
        sender = Sender(
            ShmSendChannel(1, TIMEOUT_S),
            1 << 20,
            lambda message: Posted(self.engine.update_weights(message | {"sender": "trainer"})),
        )
        info = {"sender": "trainer", "weight_sync_timeout_s": TIMEOUT_S, "rank_offset": 1, "specs": []}
        await asyncio.gather(asyncio.to_thread(sender.connect), self.engine.init_weight_sync(sender.init_info | info))
        await self.engine.begin_weight_update()
        named = list(tensors.items())
        try:
            report = await asyncio.to_thread(sender.send, specs_of(named), named)
        finally:
            sender.close()
        self.version += 1
        await self.engine.finish_weight_update(self.version, report.digests)
        await self.engine.resume()
        return len(report.digests)

    async def generate(self) -> list[Any]:
        found: dict[int, Any] = {}
        async for finished in self.engine.generate_batch([(n, prompt, GREEDY) for n, prompt in enumerate(PROMPTS)]):
            found |= dict(finished)
        return [found[n] for n in range(len(PROMPTS))]

    async def check(self, model: Any) -> None:
        """The engine computes what the model does, for prompts and while it generates."""
        for prompt, served in zip(PROMPTS, await self.engine.prompt_logprobs(PROMPTS), strict=True):
            torch.testing.assert_close(torch.tensor(served), logprobs(model, prompt), rtol=0, atol=2e-5)
        for prompt, answer in zip(PROMPTS, await self.generate(), strict=True):
            expected = logprobs(model, prompt + answer.token_ids)[len(prompt) :]
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=2e-5)
            assert answer.policy_version == self.version


def logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor(token_ids)
    with torch.no_grad():
        distribution = model(tokens[None]).logits[0].log_softmax(-1)
    return torch.cat([torch.zeros(1), distribution[:-1].gather(1, tokens[1:, None])[:, 0]])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    one = World(write_tiny_model(tmp_path_factory.mktemp("adapter") / "model"))
    with pytest.raises(WeightSyncError, match="no adapter yet"):
        run(one.generate())
    run(one.engine.start(waits_for_weights=False))
    yield one
    run(one.engine.shutdown())


def test_the_engine_serves_the_base_model_until_an_adapter_comes(world: World):
    run(world.check(transformers.AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)))


def test_the_engine_serves_each_adapter_that_is_sent(world: World, tmp_path: Path):
    for seed, change in enumerate((1.0, -2.0)):
        write_adapter(tmp_path / str(seed), world.model)
        tensors = {name: change * tensor for name, tensor in read_adapter(tmp_path / str(seed)).items()}
        assert run(world.sync(tensors)) == len(tensors)
        model = peft_model(world.model, tmp_path / str(seed))
        model.load_state_dict({n.replace(".weight", ".default.weight"): t for n, t in tensors.items()}, strict=False)
        run(world.check(model))


def refused(world: World, tensors: dict[str, torch.Tensor]) -> str:
    with pytest.raises(WeightSyncError) as error:
        run(world.sync(tensors))
    with pytest.raises(WeightSyncError, match="stays paused"):
        run(world.engine.resume())
    return str(error.value)


def first_of(world: World) -> dict[str, torch.Tensor]:
    return dict(identity_adapter(str(world.model), lora_config()))


def test_an_adapter_that_is_not_whole_or_not_of_this_model_is_refused(world: World):
    first = first_of(world)
    one = next(iter(first))
    partly = {name: tensor for name, tensor in first.items() if name != one}
    assert "1 tensors of the adapter were not received" in (message := refused(world, partly)) and one in message
    elsewhere = {name.replace(".layers.", ".blocks."): tensor.clone() for name, tensor in first.items()}
    message = refused(world, first | elsewhere)
    assert "14 modules have no LoRA slot: model.blocks.0.mlp.down_proj" in message


def call_workers(world: World, method: str) -> None:
    run(world.engine._core.llm.collective_rpc(method))


def test_slots_that_take_nothing_or_something_else_are_noticed(world: World):
    first = first_of(world)
    assert run(world.sync(first)) == len(first), "a whole one heals the engine"
    call_workers(world, "skyrl_lose_slots")
    assert "was bound to 0 layers" in refused(world, first)
    call_workers(world, "skyrl_find_slots")
    run(world.sync(first))
    call_workers(world, "skyrl_spoil_slots")
    message = refused(world, first)
    assert "hold other values than were sent" in message and "o_proj" in message


def test_a_slot_of_experts_that_holds_something_else_is_noticed():
    """vLLM's layer without the kernels that need a GPU: its slots, and what it writes into them."""
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    from skyrl_train.engines.vllm.worker.adapter_slots import _holds

    hidden, inner, rank = 6, 5, 3
    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.tp_size, layer.tp_rank, layer.device, layer._w13_slices = 1, 0, torch.device("cpu"), 2
    layer.moe_config = SimpleNamespace(
        hidden_dim=hidden,
        num_experts=2,
        num_local_experts=2,
        intermediate_size_per_partition=inner,
        moe_parallel_config=SimpleNamespace(use_ep=False, ep_rank=0),
    )
    slots = SimpleNamespace(
        max_loras=2,
        max_lora_rank=8,
        lora_dtype=torch.float32,
        fully_sharded_loras=False,
        enable_moe_shared_loras=False,
    )
    layer.create_lora_weights(slots.max_loras, slots)
    shapes = [(hidden, inner), (inner, hidden), (hidden, inner)]  # gate, down, up
    modules = [
        LoRALayerWeights(f"{e}.{m}", rank, 6, torch.randn(rank, ins), torch.randn(outs, rank))
        for e in range(2)
        for m, (ins, outs) in enumerate(shapes)
    ]
    lora = PackedLoRALayerWeights.pack_moe(modules, "experts").optimize()
    layer.set_lora(1, lora.lora_a, lora.lora_b)
    assert _holds(layer, 1, lora) and not _holds(layer, 0, lora)
    kinds = ("w13_lora_a", "w2_lora_a", "w13_lora_b", "w2_lora_b")
    buffers = [one for kind in kinds for one in getattr(layer, f"{kind}_stacked")]
    assert len(buffers) == 6
    for buffer in buffers:
        buffer[1, 1, 0, 0] += 1
        assert not _holds(layer, 1, lora)
        buffer[1, 1, 0, 0] -= 1
    layer.set_lora(1, lora.lora_a, lora.lora_b)
    assert _holds(layer, 1, lora)


def test_vllm_itself_serves_a_saved_adapter(world: World, tmp_path: Path):
    """From its folder, as `vllm serve --lora-modules` does. It takes the only slot, so it comes last."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    write_adapter(tmp_path, world.model)
    (prompt, *_), model = PROMPTS, peft_model(world.model, tmp_path)

    async def score() -> list[float]:
        params = VllmSamplingParams(max_tokens=1, prompt_logprobs=0)
        request = LoRARequest("from disk", 2, str(tmp_path))
        outputs = AsyncLLM.generate(
            world.engine._core.llm, {"prompt_token_ids": prompt}, params, "last", lora_request=request
        )
        rows = [output async for output in outputs][-1].prompt_logprobs
        return [0.0] + [row[token].logprob for row, token in zip(rows[1:], prompt[1:], strict=True)]

    run(world.engine._core.llm.collective_rpc("skyrl_repair_slots"))
    run(world.sync(first_of(world)))
    torch.testing.assert_close(torch.tensor(run(score())), logprobs(model, prompt), rtol=0, atol=2e-5)


def test_an_engine_in_fp8_serves_adapters_in_half_precision(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    world = World(model, model_dtype="bfloat16", quantization="fp8")
    write_adapter(tmp_path / "adapter", model)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft_model(model, tmp_path / "adapter")

    def difference(one: Any) -> float:
        served = [torch.tensor(row) for row in run(world.engine.prompt_logprobs(PROMPTS))]
        found = [(row - logprobs(one, prompt)).abs() for row, prompt in zip(served, PROMPTS, strict=True)]
        return float(torch.cat(found).mean())

    run(world.engine.start(waits_for_weights=False))
    before = difference(base)
    tensors = {name: tensor.bfloat16() for name, tensor in read_adapter(tmp_path / "adapter").items()}
    assert run(world.sync(tensors)) == len(tensors)
    assert max(before, difference(adapted)) < 0.2 < difference(base)
    run(world.engine.shutdown())
