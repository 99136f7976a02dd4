"""An offloaded trainer leaves its device, at the speed of the bus, and comes back bit for bit; jobs that share GPUs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.copies import come_back, pinned_copies, timed
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import VOCABULARY, make_trial, without_kl
from tests.support.jobs import DEADLY, run_to_end, write_world
from tests.support.layouts import layout

pytestmark = pytest.mark.timeout(1800)
GIB = 2**30


WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8}
NARROW = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
"""The layers of Qwen3-0.6B: its optimizer keeps over 900 tensors."""


def write_model(folder: Path, sizes: dict[str, int]) -> Path:
    """Random, about half a billion parameters: 7 to 9 GiB on the device with gradients and optimizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        **sizes,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.to("cpu").save_pretrained(folder)
    return folder


def used_bytes() -> int:
    """Of the first device of this process, by everybody."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    return int(subprocess.check_output(command, text=True).split()[0]) << 20


def kept(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Weights, float32 copies and moments, on the CPU."""
    policy._memory.settle()
    weights: list[Any] = [p for module in policy.model.modules for p in module.parameters()]
    return [tensor.detach().cpu() for tensor in weights + optimizer_tensors(policy)]


def optimizer_tensors(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Float32 copies and moments."""
    tensors: list[Any] = []
    for part in policy._optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                tensors += [parameter, state["exp_avg"], state["exp_avg_sq"]]
    return tensors


def bus_gb_per_s() -> float:
    out, back = pinned_copies()
    return 2 / (1 / out + 1 / back) / 1e9


def _turns(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, int]) -> dict[str, Any]:
    trial, one, before = arguments
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous, trial.model_path, one.megatron, OPTIMIZER, objective, bf16=True, seed=1, num_optimizer_steps=4
    )
    batch = share_of(trial, one, policy.ranks)
    policy.update(batch)
    expected, held = kept(policy), used_bytes() - before
    policy.offload()
    left = used_bytes() - before
    torch.cuda.reset_peak_memory_stats()
    come_back(policy)
    peak, reloaded = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    storages = len({tensor.untyped_storage()._cdata for tensor in optimizer_tensors(policy)})
    turns = [(policy.offload(), timed(lambda: come_back(policy))) for _ in range(3)]
    same = all(torch.equal(a, b) for a, b in zip(kept(policy), expected, strict=True))
    policy.update(batch)
    policy.offload("optimizer")
    exported = sum(tensor.numel() for _, tensor in policy.export(torch.bfloat16))
    policy.offload()
    moved = turns[0][0].num_bytes
    # The fastest, as of the bus; and no turn begins while the copies of the one before are under way.
    away_s, back_s = min(gone.seconds for gone, _ in turns), min(back for _, back in turns)
    return {
        "held": held,
        "left": left,
        "left_again": used_bytes() - before,
        "same": same,
        "storages": storages,
        "extra": peak - reloaded,
        "exported": exported,
        "gb_per_s": 2 * moved / (away_s + back_s) / 1e9,
        "out_s": [gone.seconds for gone, _ in turns],
        "back_s": [back for _, back in turns],
        "bus": bus_gb_per_s(),
        "allocated": torch.cuda.memory_allocated(),
    }


@pytest.mark.alone
@pytest.mark.gpus(1)
@pytest.mark.parametrize("sizes", [WIDE, NARROW], ids=["8 wide layers", "28 narrow layers"])
def test_an_offloaded_policy_leaves_the_device_at_the_speed_of_the_bus(sizes: dict[str, int], tmp_path: Path):
    trial = make_trial(write_model(tmp_path / "model", sizes), [7, 30, 12, 9])
    torch.cuda.empty_cache()
    (found,) = run_on_ranks(_turns, (trial, layout(1, {}), used_bytes()), 1, timeout_s=300)
    print(found)
    assert found["same"] and found["exported"] > 4e8
    assert found["held"] > 6 * GIB
    assert found["storages"] == 1 and found["extra"] < GIB / 64, "there is never a second copy on the device"
    assert found["left"] <= 1.25 * GIB and found["left_again"] <= 1.25 * GIB
    assert found["gb_per_s"] >= 0.8 * found["bus"], f"{found['gb_per_s']:.1f} of {found['bus']:.1f} GB/s"


COLOCATED = [
    "trainer.placement.colocate_all=true",
    "trainer.verify_sync_every=1",
    "trainer.max_training_steps=3",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.hf_save_interval=2",
    "trainer.eval_interval=2",
    "data.val_data=[rows.jsonl]",
    "generator.gpu_memory_utilization=0.1",  # others start on the same GPUs
    "generator.kv_cache_memory_gb=4",  # an engine fails to sleep if meanwhile others take more than it returns
]


@pytest.mark.alone
@pytest.mark.gpus(1)
def test_a_job_shares_one_gpu_in_each_mode_and_every_sync_is_proven(tmp_path: Path):
    """The second resumes from a checkpoint of the first, and is what the forecast chooses for a model so small."""
    world = write_world(tmp_path / "world")
    first = world / "runs/offload/checkpoints/global_step_1"
    checkpoints = {
        "offload": ["trainer.ckpt_interval=1", "trainer.max_ckpts_to_keep=-1"],
        "chosen": ["trainer.resume_mode=from_path", f"trainer.resume_path={first}", "trainer.ckpt_interval=-1"],
    }
    for name, release in (("offload", "offload"), ("chosen", "null")):
        overrides = [f"trainer.run_name={name}", f"trainer.placement.release={release}", "trainer.bf16=true"]
        code, job = run_to_end(world, *COLOCATED, *overrides, *checkpoints[name])
        assert code == 0, job.story()
        assert (release == "null") is ("release=none, because" in job.output)
        steps = [row for row in job.metrics if "policy/grad_norm" in row]
        assert [row["trainer/global_step"] for row in steps] == ([2, 3] if release == "null" else [1, 2, 3])
        assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 0.05 for row in steps)
        if release == "null":
            assert all(
                row["memory/training/engine_gib"] > 4 and row["memory/training/policy_gib"] > 0.06 for row in steps
            )
            assert all("timing/offload" not in row for row in steps)
            continue
        assert all(row["memory/reference/engine_gib"] < row["memory/rollout/engine_gib"] for row in steps)
        held = [row.get("memory/rollout/policy_gib", 0) for row in steps]
        assert max(held) < 0.01, "of an offloaded policy small things stay"


@pytest.mark.gpus(2)
def test_training_continues_with_the_engine_that_is_left(tmp_path: Path):
    """Two engines share GPUs with two ranks; one is killed when the last sample of the first step is scored."""
    world = write_world(tmp_path / "world")
    (world / "deadly.py").write_text(DEADLY)
    overrides = [
        "trainer.run_name=left",
        "environment.env_class=deadly:Deadly",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
        "generator.num_inference_engines=2",
        "data.val_data=[]",
    ]
    environment = {"DEATHS": json.dumps({32: str(world / "runs/left/logs/engine-1.log")})}
    code, job = run_to_end(world, *COLOCATED, *overrides, "trainer.bf16=true", environment=environment)
    assert code == 0, job.story()
    assert job.output.count("not restarting engine-1") == 1 and "not restarting engine-0" not in job.output
    assert all(
        row["policy/rollout_train_logprobs_abs_diff_mean"] < 0.05 for row in job.metrics if "policy/grad_norm" in row
    )


NO_FUSED_ALL_REDUCE = "{compilation_config:{pass_config:{fuse_allreduce_rms:false}}}"


@pytest.mark.gpus(2)
@pytest.mark.parametrize("engine", [1, 2], ids=["two engines", "one engine of two GPUs"])
def test_a_pipeline_shares_two_gpus_with_its_engines(tmp_path: Path, engine: int):
    world = write_world(tmp_path / "world")
    layouts = [
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
        f"generator.inference_engine_tensor_parallel_size={engine}",
        f"generator.num_inference_engines={2 // engine}",
        # Else an engine of two GPUs compiles FlashInfer's all-reduce, for minutes if the machine has no copy of it.
        f"generator.engine_init_kwargs={NO_FUSED_ALL_REDUCE}",
    ]
    code, job = run_to_end(world, *COLOCATED, *layouts, "trainer.bf16=true")
    assert code == 0, job.story()


@pytest.mark.alone
@pytest.mark.gpus(1)
@pytest.mark.parametrize("takes_all", [True, False], ids=["for clients", "for the samples alone"])
def test_an_engine_takes_what_trainers_leave_and_keeps_the_margin_through_every_turn(takes_all: bool, tmp_path: Path):
    """The model is tiny: what is not free is the engine's share and what trainers keep. Nobody knows how many clients
    there will be, so the cache for them is all that the share has room for. Test processes that wait hold CUDA
    contexts on the device."""
    world, total = write_world(tmp_path / "world"), torch.cuda.get_device_properties(0).total_memory / GIB
    usable = total - used_bytes() / GIB
    overrides = [one for one in COLOCATED if "gpu_memory_utilization" not in one]
    overrides += ["trainer.run_name=free", "trainer.bf16=true", "generator.http_endpoint_port=0"]
    overrides.append("trainer.placement.release=offload")  # chosen for clients, but not for so small a model
    overrides.append("generator.kv_cache_memory_gb=null")
    code, job = run_to_end(world, *overrides, f"generator.enable_http_endpoint={str(takes_all).lower()}")
    assert code == 0, job.story()
    lines = (world / "runs/free/logs/engine-0.log").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("gpu_memory_utilization: ")]
    assert takes_all != any(line.startswith("kv_cache_memory_gb: ") for line in lines)
    taken = float(line.split()[1].rstrip(",")) * total
    print(line, total, usable)
    assert taken > 0.8 * usable
    steps = [row for row in job.metrics if "policy/grad_norm" in row]
    free = min(row["memory/rollout/device_free_gib"] for row in steps)
    held = max(row["memory/rollout/engine_gib"] for row in steps)
    print({"free": free, "engine": held})
    assert held > 0.9 * taken if takes_all else held < 3
    assert free > 0.05 * usable, "for buffers, and not eaten by trainers"
