"""Weights on their way on GPUs: digests, CUDA IPC, and copies straight into the engine's parameters."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.device.memory import allocate_in_pages
from skyrl_train.engines.settings import quantised
from skyrl_train.ranks import free_port
from skyrl_train.weight_sync.bucket import unpack
from tests.support.sending import bucket_digests, pack, specs_of

CONTEXT = multiprocessing.get_context("spawn")
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def tensors(device: str, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3000, 512), (7,), (), (129, 1024), (4096, 4096)]
    return [
        (f"t{n}.{dtype}", (torch.randn(shape, generator=generator) * scale).to(dtype).to(device))
        for n, shape in enumerate(shapes)
        for dtype in DTYPES
    ]


@pytest.mark.gpus(1)
def test_a_gpu_computes_the_digests_that_a_cpu_does():
    for bucket in pack(tensors("cpu"), 1 << 20):
        on_gpu = type(bucket)(bucket.specs, bucket.data.cuda())
        assert bucket_digests(on_gpu) == bucket_digests(bucket)


SETTINGS = """
import torch
from skyrl_train.device.memory import allocate_in_pages, memory_to_share

def settings():
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    return [found[name] for name in ("expandable_segments", "max_split_size", "garbage_collection_threshold")]

torch.zeros(1, device="cuda")
print(allocate_in_pages())
print(*settings())
with memory_to_share():
    print(*settings())
print(*settings())
"""


@pytest.mark.gpus(1)
@pytest.mark.parametrize("pages", ["", ",expandable_segments:True"], ids=["pages of this program", "pages of its user"])
def test_what_the_user_says_of_the_allocator_stays(pages: str):
    given = os.environ | {"PYTORCH_ALLOC_CONF": f"max_split_size_mb:512,garbage_collection_threshold:0.75{pages}"}
    given.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    printed = subprocess.check_output([sys.executable, "-c", SETTINGS], text=True, env=given).splitlines()
    assert printed == ["True", *(f"{pages} {512 << 20} 0.75" for pages in (True, False, True))]


def _receive(init_info: Any, messages: Any, answers: Any) -> None:
    from skyrl_train.weight_sync.channels.cuda_ipc import CudaIpcReceiveChannel
    from skyrl_train.weight_sync.transport import Receiver

    torch.cuda.set_device(0)
    receiver = Receiver(CudaIpcReceiveChannel(init_info, 60))
    kept: dict[str, torch.Tensor] = {}
    while (message := messages.get()) is not None:
        digests = receiver.receive(message, lambda pairs: kept.update({n: t.cpu() for n, t in pairs}))
        answers.put((digests, {name: float(tensor.double().sum()) for name, tensor in kept.items()}))


class _Pending:
    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self.answer: Any = None

    def check(self) -> None:
        pass

    def wait(self) -> None:
        self.answer = self._answers.get(timeout=60)


@pytest.mark.gpus(1)
def test_another_process_on_the_gpu_gets_every_byte_and_the_memory_comes_back():
    from skyrl_train.weight_sync.channels.cuda_ipc import CudaIpcSendChannel
    from skyrl_train.weight_sync.transport import Sender

    torch.cuda.set_device(0)
    assert allocate_in_pages(), "a trainer's memory, of which only the buckets can be shared"
    channel = CudaIpcSendChannel(60)
    messages, answers = CONTEXT.Queue(), CONTEXT.Queue()
    process = CONTEXT.Process(target=_receive, args=(channel.init_info, messages, answers), daemon=True)
    process.start()
    pending = _Pending(answers)

    def post(message: Any) -> _Pending:
        messages.put(message)
        return pending

    sender = Sender(channel, 1 << 20, post)
    sender.connect()
    for scale in (1.0, 2.0, 3.0):
        source = tensors("cuda", scale)

        def overwritten(source: Any = source) -> Any:
            yield from source
            for _, tensor in source:
                tensor.zero_()  # the sender has copied all

        report = sender.send(specs_of(source), overwritten())
        digests, sums = pending.answer
        assert digests == report.digests
        assert sums == {name: float(tensor.double().sum()) for name, tensor in tensors("cpu", scale)}
    del source, overwritten
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 64 << 20
    messages.put(None)
    process.join(timeout=30)
    sender.close()


PROMPTS = [[4 + (11 * n + k) % 50 for k in range(5 + n)] for n in range(4)]


class UpdatesItself:
    """Mixed into vLLM's worker: takes the weights of checkpoints as updates."""

    def update_from(self, folder: str) -> bool:
        from safetensors.torch import load_file

        from skyrl_train.engines.vllm.worker.update import ModelUpdate

        worker: Any = self
        model, config = worker.model_runner.get_model(), worker.vllm_config
        if not hasattr(worker, "skyrl_test_update"):
            worker.skyrl_test_update = ModelUpdate(model, config)
        update = worker.skyrl_test_update
        files = sorted(Path(folder).glob("*.safetensors"))
        weights = [(name, tensor.bfloat16()) for file in files for name, tensor in load_file(file).items()]
        update.expect("trainer", specs_of(weights))
        update.begin(model, config.model_config)
        for bucket in pack(weights, 8 << 20):
            update.load(list(unpack(type(bucket)(bucket.specs, bucket.data.cuda()))))
        assert update.faults() == []
        update.finish()
        return update.copies_directly


def _engine(folder: Path, quantization: str | None) -> Any:
    # Left to itself vLLM takes a port that the kernel may give to another of these engines before it listens.
    port = {"VLLM_PORT": str(free_port())}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"} | port
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        **(quantised(quantization) if quantization else {}),
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.2,
        max_model_len=512,
        worker_extension_cls="tests.gpu.test_weight_sync.UpdatesItself",
    )


def answers_of(folder: Path, updates: list[Path], quantization: str | None = None) -> list[tuple[bool, Any]]:
    """After each update, or at once: whether updates are copied directly, and tokens and logprobs."""
    from vllm import SamplingParams

    llm = _engine(folder, quantization)
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def ask() -> Any:
        found = []
        for one in llm.generate(prompts, params, use_tqdm=False):
            output = one.outputs[0]
            rows = [*(one.prompt_logprobs or [])[1:], *(output.logprobs or [])]
            found.append((list(output.token_ids), [[entry.logprob for entry in row.values()] for row in rows]))
        return found

    results = []
    for update in updates:
        (direct,) = llm.collective_rpc("update_from", args=(str(update),))
        llm.reset_prefix_cache()
        results.append((direct, ask()))
    return results or [(False, ask())]


def two_checkpoints(kind: str, folder: Path, **sizes: Any) -> list[Path]:
    """Of one shape, with different weights."""
    from safetensors.torch import load_file, save_file

    from tests.support.families import write_family

    folders = [write_family(kind, folder / str(number), **sizes) for number in range(2)]
    for file in folders[1].glob("*.safetensors"):
        changed = {name: (tensor.float() * 1.5 + 0.01).to(tensor.dtype) for name, tensor in load_file(file).items()}
        save_file(changed, file, metadata={"format": "pt"})
    return folders


@pytest.mark.gpus(1)
@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen2", "qwen3_moe"])
def test_copies_into_parameters_leave_what_a_fresh_engine_has(kind: str, tmp_path: Path):
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    folders = two_checkpoints(kind, tmp_path, **sizes)
    order = [1, 0, 1, 0, 1]
    updates = [[], [], [folders[which] for which in order]]
    with ProcessPoolExecutor(3, mp_context=CONTEXT) as pool:
        *fresh, updated = pool.map(answers_of, [*folders, folders[0]], updates, timeout=240)
    fresh = [answers for ((_, answers),) in fresh]
    assert all(direct for direct, _ in updated), "the first update has verified the plan"
    for which, (_, answers) in zip(order, updated, strict=True):
        assert answers == fresh[which]
