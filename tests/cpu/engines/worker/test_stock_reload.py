"""A stock vLLM worker whose update failed within a layer, and what repairs it: real loading, with NCCL left out."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.settings import MIB, engine_settings

pytestmark = pytest.mark.slow
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
CUTS = ["mlp.experts.0.down_proj.weight", "mlp.experts.2.gate_proj.weight", "self_attn.k_proj.weight"]
"""The last tensors, of layer 0, that come before an update breaks off: others of the same fused layer are missing."""


def in_order(folder: str, scale: float) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    names = sorted(weights, key=lambda name: (int(name.split(".")[2]) if ".layers." in name else -1, name))
    return [(name, weights[name] * scale) for name in names]


class Stock:
    """vLLM's own worker in this process, with its backend `nccl`."""

    def __init__(self, folder: str) -> None:
        from skyrl_train.engines.settings import engine_arguments, set_environment

        settings = engine_settings(folder, "stock", "float32", 128, kv_cache_memory_gb=16 * MIB, max_num_seqs=16)
        set_environment(settings, "cpu")
        from vllm import LLM

        kwargs = {"max_logprobs": -1, "skip_tokenizer_init": True, "weight_transfer_config": {"backend": "nccl"}}
        arguments = engine_arguments(settings.changed(engine_init_kwargs=kwargs), "cpu")
        for ours in ("enable_log_requests", "worker_extension_cls", "scheduler_cls"):
            arguments.pop(ours, None)
        self.llm: Any = LLM(**arguments)
        self.worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def start(self) -> None:
        from skyrl_train.engines.vllm.worker.layerwise import _forget_packed_experts

        _forget_packed_experts(self.worker.get_model())  # of vLLM's CPU build alone: stock servers have GPUs
        self.worker.start_weight_update()

    def receive(self, named: Sequence[tuple[str, torch.Tensor]], *, breaks_off: bool = False) -> None:
        """Raises: RuntimeError if it breaks off."""

        def arrived(info: Any) -> None:
            self.worker.weight_transfer_engine.model.load_weights(iter(named))
            if breaks_off:
                raise RuntimeError("the sender has gone")

        self.worker.weight_transfer_engine.receive_weights = arrived
        self.worker.update_weights({"names": [], "dtype_names": [], "shapes": []})

    def finish(self) -> Any:
        """Returns: answers, with the logprobs of the whole vocabulary."""
        from tests.support.engine_host import answers

        self.worker.finish_weight_update()
        assert self.llm.reset_prefix_cache()
        return answers(self.llm)


def main(folder: str, cuts: list[str]) -> None:
    stock = Stock(folder)
    broken, whole = in_order(folder, 1.3), in_order(folder, 0.9)
    stock.start()
    stock.receive(whole)
    expected = stock.finish()
    names = [name for name, _ in whole]
    found = []
    for closes in (True, False):
        for cut in cuts:
            stock.start()
            with contextlib.suppress(RuntimeError):
                stock.receive(broken[: names.index(f"model.layers.0.{cut}") + 1], breaks_off=True)
            if closes:  # like RemoteEngine
                stock.start()
                stock.worker.finish_weight_update()
            try:
                stock.start()
                stock.receive(whole)
                found.append("right" if stock.finish() == expected else "wrong")
            except Exception as error:
                found.append(str(error))
    print(json.dumps(found))


def test_an_update_of_nothing_repairs_half_loaded_layers(tmp_path: Path):
    from tests.support.families import write_family

    folder = write_family("qwen3_moe", tmp_path / "model", **SIZES)
    command = [sys.executable, "-m", "tests.cpu.engines.worker.test_stock_reload", str(folder), *CUTS]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[: len(CUTS)] == ["right"] * len(CUTS)
    assert found[len(CUTS)] == "wrong", "vLLM has fixed it: then nothing needs to be closed"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
