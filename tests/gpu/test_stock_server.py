"""Weights into a server of stock vLLM, through its own NCCL backend. No network is needed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_train.engines.remote.engine import RemoteEngine
from skyrl_train.engines.remote.stock_nccl import StockNcclSender
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.channels.channel import SendingEnd
from tests.support.jobs import run_to_end, write_world
from tests.support.remote_servers import KEY, Posted, Server, connect, vllm_server
from tests.support.sending import specs_of
from tests.support.settings import remote_settings
from tests.support.tiny import write_tiny_model

pytestmark = pytest.mark.timeout(900)
GREEDY = SamplingParams(max_generate_length=16, temperature=0.0)
PROMPTS = [[4 + (7 * n + k) % 50 for k in range(5 + n)] for n in range(8)]
WIDER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}


def stock_server(model: Path, gpu: str, dtype: str = "bfloat16"):
    return vllm_server(
        model,
        model.parent / f"server.{gpu}.log",
        {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"},
        dtype=dtype,
        max_model_len=64,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,  # sized by what is free, it fails when other tests free memory meanwhile
        logprobs_mode="processed_logprobs",
        weight_transfer_config=json.dumps({"backend": "nccl"}),
    )


async def answers(engine: RemoteEngine) -> list[Generation]:
    found: dict[int, Generation] = {}
    async for finished in engine.generate_batch([(n, prompt, GREEDY) for n, prompt in enumerate(PROMPTS)]):
        found |= dict(finished)
    return [found[n] for n in range(len(PROMPTS))]


def engine_of(server: Server, model: Path) -> RemoteEngine:
    return RemoteEngine(remote_settings(server.url, KEY, str(model), "bfloat16", 64, "vllm_nccl", 120))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1 << 30], ids=["many chunks", "one chunk"])
def test_a_stock_server_answers_as_one_that_loaded_the_checkpoint(bucket_bytes: int, gpus: list[str], tmp_path: Path):
    trained = write_tiny_model(tmp_path / "trained", seed=0, **WIDER)
    other = write_tiny_model(tmp_path / "other", seed=1, **WIDER)
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).to("cuda:0")
    named = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]

    async def main(server: Server, fresh: Server) -> None:
        engine, expected = engine_of(server, trained), engine_of(fresh, trained)
        workers = (await engine.start(waits_for_weights=False)).num_workers
        await expected.start(waits_for_weights=False)
        loop = asyncio.get_running_loop()
        device = torch.device("cuda:0")
        end = SendingEnd(
            lambda message: Posted(engine, message, loop), bucket_bytes, workers, device, 120.0, "127.0.0.1"
        )
        sender = StockNcclSender(end)
        before = await answers(engine)
        await connect(engine, sender, named)
        wanted = await answers(expected)
        for version in (1, 2):
            await engine.begin_weight_update()
            report = await asyncio.to_thread(sender.send, specs_of(named), named)
            await engine.finish_weight_update(version, {})
            await engine.resume()
            assert report.num_bytes == sum(tensor.nbytes for _, tensor in named)
            served = await answers(engine)
            assert [one.token_ids for one in served] == [one.token_ids for one in wanted]
            for one, two in zip(served, wanted, strict=True):
                assert one.logprobs == pytest.approx(two.logprobs, abs=1e-6)
            assert [one.token_ids for one in served] != [one.token_ids for one in before]
            assert {one.policy_version for one in served} == {version}
        sender.close()
        await engine.shutdown()
        await expected.shutdown()

    with stock_server(other, gpu=gpus[1]) as server, stock_server(trained, gpu=gpus[0]) as fresh:
        asyncio.run(main(server.wait(), fresh.wait()))


@pytest.mark.parametrize(
    "stages", [pytest.param(1, marks=pytest.mark.gpus(2)), pytest.param(2, marks=pytest.mark.gpus(3))]
)
def test_a_run_trains_with_a_stock_server(stages: int, gpus: list[str], tmp_path: Path):
    """The proof that a stock server computes with the policy's weights is the comparison of logprobs at each sync."""
    world = write_world(tmp_path / "world")
    other = write_tiny_model(world / "other", seed=1)
    with stock_server(other, gpu=gpus[stages], dtype="float32") as server:
        server.wait()
        code, job = run_to_end(
            world,
            "generator.run_engines_locally=false",
            f"generator.remote_inference_engine_urls=[{server.url}]",
            "generator.remote_api_key_env=KEY_OF_THE_TEST",
            "generator.weight_sync_backend=vllm_nccl",
            f"trainer.placement.policy_num_gpus_per_node={stages}",
            f"trainer.policy.megatron_config.pipeline_model_parallel_size={stages}",
            "trainer.policy.optimizer_config.lr=1e-2",
            "trainer.verify_sync_every=1",
            environment={
                "KEY_OF_THE_TEST": KEY,
                "CUDA_VISIBLE_DEVICES": ",".join(gpus[:stages]),
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
            },
        )
        assert code == 0, job.story()
        assert len(job.metrics) == 2
        for step in job.metrics:
            # vLLM computes float32 in TensorFloat-32 on a GPU; other weights would be a hundred times further away.
            assert step["policy/rollout_train_logprobs_abs_diff_mean"] < 5e-3
