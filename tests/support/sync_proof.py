"""Sync, then twice train, offload, reload, sync; after each sync the running engine against a fresh one on the export.

The trained side is a real `MegatronPolicy` in processes of this machine, which sends through the real transports; the
engine is vLLM with the real receiver (engine_host.py). Ray and the actors are left out: test_sync_end_to_end.py has
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.config import load_config
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.weight_sync.bucket import TensorSpec
from skyrl_train.weight_sync.channels.channel import SendingEnd, WeightSender
from skyrl_train.weight_sync.channels.table import open_sender
from tests.support.engine_host import Answers, Client, Posted
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import WHOLE, layout

SYNCS = 3
TIMEOUT_S = 60.0
BUCKET_BYTES = 60_000
"""Small, so that every sync takes many buckets and fused layers are cut in the middle."""

# vLLM's CPU kernels know head sizes from 32 on, for latent attention 576 = 512 + 64 alone.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense tied": ("qwen3_tied", {"head_dim": 32}),
    "dense untied": ("qwen2", {"hidden_size": 128}),
    "experts": ("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 64}),
    "latent attention": (
        "deepseek_v3",
        {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
        },
    ),
    "GLM experts": ("glm4_moe", {"head_dim": 32, "moe_intermediate_size": 64}),
}
# vLLM reads how many layers are dense, transformers a list of the layers.
KINDS["GLM latent attention"] = ("glm4_moe_lite", {**KINDS["latent attention"][1], "first_k_dense_replace": 1})
LORA = " LoRA"
"""The end of a kind of which adapters are trained, and merged into the weights on their way."""
KINDS |= {kind + LORA: KINDS[kind] for kind in ("dense tied", "experts", "latent attention")}
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "PP2": (2, {"pp": 2}),
    "TP2": (2, {"tp": 2}),
    "EP2": (2, {"ep": 2}),
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    kind: str
    sizes: str
    dtype_name: str
    """Of the trainer, and of the engine's weights; the latter may be fp8, which arrive in bfloat16."""
    transport: str = "shm"

    def __str__(self) -> str:
        return f"{self.kind}, {self.sizes}, {self.dtype_name}, {self.transport}"

    @property
    def sent(self) -> str:
        """Name of the dtype in which weights are trained and sent."""
        return "bfloat16" if self.dtype_name == "fp8" else self.dtype_name


def all_cases() -> list[Case]:
    return [
        Case(kind, sizes, dtype_name, transport)
        for kind in KINDS
        for dtype_name in ("float32", "bfloat16")
        for sizes in SIZES
        if sizes != "EP2" or "experts" in kind or "latent" in kind
        for transport in ("shm", "broadcast")
        if transport == "shm" or (sizes == "PP2" and not kind.endswith(LORA))
    ]


@dataclass(frozen=True)
class Round:
    """What the two engines answered after one sync."""

    synced: Answers
    fresh: Answers


@dataclass(frozen=True)
class Work:
    """Settings of a rank."""

    case: Case
    trial: Trial
    layout: Layout
    synced: str
    """Address of the host whose engine is synced."""
    fresh: str
    """Address of the host that starts an engine on every export."""
    folder: str


def write_kind(kind: str, folder: Path) -> Path:
    family, changes = KINDS[kind]
    return write_family(family, folder, **changes)


def prove(case: Case, synced: str, fresh: str, source: Path, folder: Path) -> list[Round]:
    """Run a case against two hosts; the engine that is synced starts on the source."""
    Client(synced).call("start", str(source), case.dtype_name)
    processes, sizes = SIZES[case.sizes]
    trial = make_trial(source)
    trial = replace(trial, bf16=case.sent == "bfloat16", objective=without_kl(trial.objective))
    work = Work(case, trial, layout(processes, sizes, WHOLE), synced, fresh, str(folder))
    return run_on_ranks(_train_and_sync, work, processes, timeout_s=240)[0]


def _train_and_sync(rendezvous: Rendezvous, work: Work) -> list[Round]:
    torch.set_num_threads(1)
    trial, megatron = work.trial, work.layout.megatron
    policy = MegatronPolicy(
        rendezvous,
        trial.model_path,
        megatron,
        replace(OPTIMIZER, lr=1e-2),
        trial.objective,
        bf16=trial.bf16,
        seed=1,
        num_optimizer_steps=10,
        lora=replace(load_config().trainer.policy.model.lora, rank=8 if work.case.kind.endswith(LORA) else 0),
    )
    batch = share_of(trial, work.layout, policy.ranks)
    sync = _Sync(policy, work)
    rounds = []
    for number in range(SYNCS):
        if number:
            policy.update(batch)
            policy.offload()
            policy.reload()
        synced = sync.run()
        export = f"{work.folder}/{number}"
        policy.save_hf(export)
        if synced is not None:
            fresh = Client(work.fresh)
            fresh.call("start", export, work.case.dtype_name)
            rounds.append(Round(synced, fresh.call("answers")))
    # What is sent to receivers that have one sender for all stages.
    specs, tensors = policy.specs_of_every_stage(sync.dtype), policy.export_to_every_stage(sync.dtype)
    assert specs == [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    return rounds


class _Sync:
    """The trainer's side of a sync, as cluster/ranks/policy_group.py orders it: stage after stage, rank 0 conducts."""

    def __init__(self, policy: MegatronPolicy, work: Work) -> None:
        self._policy, self.dtype = policy, getattr(torch, work.case.sent)
        self.client = Client(work.synced)
        self._rank = dist.get_rank()
        self._name = {"sender": f"policy-{self._rank}"}
        self._num_stages = work.layout.megatron.pipeline_model_parallel_size
        self._sender: WeightSender | None = None
        for rank in range(dist.get_world_size()):
            if rank == self._rank and policy.ranks.owns_stage:
                self._connect(work.case.transport)
            dist.barrier()

    def _connect(self, transport: str) -> None:
        def post(message: dict[str, Any]) -> Posted:
            return self.client.post("update", message | self._name)

        end = SendingEnd(post, BUCKET_BYTES, 1, torch.device("cpu"), TIMEOUT_S, "127.0.0.1")
        self._sender = open_sender(transport, end)
        specs = [spec.to_message() for spec in self._policy.export_specs(self.dtype)]
        info = self._sender.init_info | self._name | {"rank_offset": 1, "weight_sync_timeout_s": TIMEOUT_S}
        info |= {"specs": specs}
        joined = self.client.post("init", info)
        self._sender.connect()
        joined.wait()

    def run(self) -> Answers | None:
        """The synced engine's answers, on rank 0."""
        if self._rank == 0:
            self.client.call("begin")
        dist.barrier()
        digests: dict[str, int] = {}
        for stage in range(self._num_stages):
            if self._policy.ranks.pp_rank == stage:
                tensors = self._policy.export(self.dtype)
                if self._sender is None:
                    for _ in tensors:
                        pass
                else:
                    digests = self._sender.send(self._policy.export_specs(self.dtype), tensors).digests
            dist.barrier()
        parts: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, digests)
        merged = {name: digest for part in parts for name, digest in part.items()}
        return self.client.call("finish", merged) if self._rank == 0 else None
