"""A real engine that quantises weights as they arrive. Against one that quantises an export as it loads it:
tests/cpu/weight_sync/test_sync_proof.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skyrl_train.engines.vllm.worker.transfer import SyncExtension
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.live_engine import Named, World, live_world, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = [[4 + (7 * n + k) % 50 for k in range(40 + n)] for n in range(4)]


class Seen(SyncExtension):
    """A worker that shows what it holds."""

    model_runner: Any

    def dtypes(self) -> dict[str, str]:
        return {name: str(parameter.dtype) for name, parameter in self.model_runner.get_model().named_parameters()}

    def copies_directly(self) -> bool:
        update: Any = self.weight_transfer_engine._update
        return update.copies_directly


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    kwargs = {"block_size": 32, "worker_extension_cls": f"{__name__}.Seen"}
    values: dict[str, Any] = {"model_dtype": "bfloat16", "quantization": "fp8", "engine_init_kwargs": kwargs}
    yield from live_world(tmp_path_factory.mktemp("quantised"), **values)


def weights(world: World, which: int) -> Named:
    return [(name, tensor.bfloat16()) for name, tensor in world.weights(which)]


def asked(world: World, method: str) -> Any:
    return run(world.engine._core.ask_workers(method, "asking"))[0]


def difference(world: World, which: int) -> float:
    """Mean |difference| in nats between the engine's logprobs and those of a checkpoint in float32."""
    found = []
    for prompt, served in zip(PROMPTS, run(world.engine.prompt_logprobs(PROMPTS)), strict=True):
        with torch.no_grad():
            rows = world.models[which](torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = rows[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        found.append((torch.tensor(served[1:]) - expected).abs())
    return float(torch.cat(found).mean())


def test_the_matrices_of_layers_are_in_fp8_and_nothing_else(world: World):
    for synced in (False, True):
        if synced:
            run(world.sync(weights(world, 1)))
        dtypes = asked(world, "dtypes")
        quantised = {name for name, dtype in dtypes.items() if dtype == "torch.float8_e4m3fn"}
        assert quantised == {name for name in dtypes if name.endswith("_proj.weight")} and len(quantised) == 8
        scales = {name.replace("weight", "weight_scale") for name in quantised}
        assert {name for name, dtype in dtypes.items() if dtype == "torch.float32"} == scales
        assert dtypes["model.embed_tokens.weight"] == "torch.bfloat16"


def test_each_sync_is_quantised_anew_and_never_copied(world: World):
    """From the second sync on, weights that are not quantised would be copied into the parameters."""
    seen = []
    for which in (0, 1, 0, 1):
        run(world.sync(weights(world, which), 70_000))
        assert 0.02 < difference(world, which) < 0.2 < 0.6 < difference(world, 1 - which)
        assert not asked(world, "copies_directly")
        seen.append(run(world.engine.prompt_logprobs(PROMPTS)))
    assert seen[0] == seen[2] != seen[1] == seen[3]


def broken_off(world: World, sent: Named, message: str, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    async def fail() -> None:
        report = await world.send(sent, 4096)
        await world.engine.finish_weight_update(9, change(report.digests))

    with pytest.raises(Exception, match=message):
        run(fail())
    with pytest.raises(WeightSyncError, match="stays paused"):
        run(world.engine.resume())
    run(world.sync(weights(world, 1)))
    assert difference(world, 1) < 0.2


@pytest.mark.parametrize("lost", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_quantised_matrix_of_which_a_part_was_not_sent_is_named(world: World, lost: str):
    sent = [(name, tensor) for name, tensor in weights(world, 1) if name != f"model.layers.1.{lost}.weight"]
    layer = lost.replace("k_proj", "qkv_proj").replace("up_proj", "gate_up_proj")
    broken_off(world, sent, f"did not get all their weights: .*layers.1.{layer}", dict)


def test_other_bytes_of_a_quantised_matrix_are_found_before_they_are_quantised(world: World):
    name = "model.layers.0.mlp.down_proj.weight"
    broken_off(world, weights(world, 1), f"other bytes: {name}", lambda sent: sent | {name: sent[name] ^ 1})
