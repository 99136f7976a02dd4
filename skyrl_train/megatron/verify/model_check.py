"""Check that Megatron computes a model's configuration, made small, like Hugging Face.

    python -m skyrl_train.megatron.verify.model_check FOLDER

FOLDER needs a config.json but no weights: they are random. Both run one mini-batch on the CPU; logprobs and the
gradient of every tensor are compared. Prints the `Verdict` as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, set_seed

from skyrl_train.config import load_config
from skyrl_train.hf.shrink import shrunk
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import Layout, run_layout
from skyrl_train.megatron.verify.outcome import FLOAT32, compare
from skyrl_train.megatron.verify.trial import random_trial

LENGTHS = (40, 7, 23, 2, 31, 12)
"""Tokens of the samples: beyond `shrink.WINDOW` and `shrink.SHORT`, and within."""
TIMEOUT_S = 500.0
SEEDS = (0, 1)
"""Rounding may decide a routing tie differently with one set of weights, but hardly with two."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Difference of the small model from Hugging Face's."""

    gradient: float
    """|g - g'| / |g'| of all tensors as one vector."""
    worst: tuple[str, float]
    """(name, difference) of the tensor whose gradient differs most."""
    logprobs: float
    """Largest difference, over the largest logprob."""
    problems: list[str]
    """A sentence for each bound that is exceeded."""


def check_model(config: PretrainedConfig) -> Verdict:
    """Compare the small model of `config` with Hugging Face's on one mini-batch.
    Raises: RuntimeError or ValueError if one of the two cannot be built.
    """
    small = shrunk(config)
    verdict = _compare(small, SEEDS[0])
    for seed in SEEDS[1:]:
        if verdict.problems:
            verdict = _compare(small, seed)
    return verdict


def _compare(config: PretrainedConfig, seed: int) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        _write_weights(config, folder, seed)
        padding = getattr(config, "pad_token_id", None)
        trial = random_trial(folder, LENGTHS, [1] * len(LENGTHS), config.vocab_size, padding=padding)
        reference = hugging_face(trial)
        megatron = replace(load_config().trainer.policy.megatron_config, transformer_impl="torch")
        outcome = run_layout(trial, Layout(megatron, world_size=1, max_tokens=sum(LENGTHS)), timeout_s=TIMEOUT_S)
    difference = compare(comparable(outcome, reference), reference)
    return Verdict(difference.gradient, difference.worst_tensor, difference.logprobs, FLOAT32.exceeded(difference))


def _write_weights(config: PretrainedConfig, folder: str, seed: int) -> None:
    """Save random weights with which everything in the model matters: scores, gates and logits of size 1."""
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if tensor.dim() > 1:
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
            else:
                tensor += 0.1 * torch.randn_like(tensor)
    model.generation_config = GenerationConfig()  # saving validates what older files say about generation
    model.save_pretrained(folder)


def main(argv: list[str]) -> int:
    torch.set_num_threads(1)  # the Megatron process is forked from this one
    config = AutoConfig.from_pretrained(argv[0], trust_remote_code=False)
    print(json.dumps(dataclasses.asdict(check_model(config))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
