"""Checkpoints of real model shapes with random weights, made on the spot: speed does not depend on what they know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyrl_train.forecast.shapes import model_config, shapes

VOCABULARY = 151_936
DIGIT_SHARE = "benchmarks.lib.digit_share:DigitShare"
MAX_SHARD_BYTES = 4 * 2**30
SHAPES = tuple(shapes())


def write_checkpoint(folder: Path, shape: str, num_layers: int | None = None) -> None:
    """Configuration, tokenizer and random bfloat16 weights (normal, 0.02; norms are 1).

    The weights are drawn on the GPU where there is one: a model of 4 billion takes seconds. Call it in a process that
    may use the GPU.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(shape, num_layers)
    config.architectures = ["Qwen3MoeForCausalLM" if hasattr(config, "num_experts") else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        if shard:
            file = f"model-{len(set(weight_map.values())):05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard.clear()

    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for hf_name, size in _as_saved(name, tuple(parameter.shape)):
            draw = torch.ones if len(size) == 1 else _normal
            shard[hf_name] = draw(size, dtype=torch.bfloat16, device=device).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > MAX_SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _normal(size: tuple[int, ...], **kwargs: Any) -> Any:
    import torch

    return torch.empty(size, **kwargs).normal_(0, 0.02)


def _as_saved(name: str, size: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a checkpoint: transformers 5 holds the experts of a layer in two tensors and saves each."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        num, both, width = size
        names = [f"{stem}.{expert}.{part}_proj.weight" for expert in range(num) for part in ("gate", "up")]
        return [(one, (both // 2, width)) for one in names]
    if last == "down_proj":
        return [(f"{stem}.{expert}.down_proj.weight", size[1:]) for expert in range(size[0])]
    return [(name, size)]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A token for every id ("w17" is 17), words parted by spaces, and no end-of-text token: no response ends early."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        model_max_length=40_960,
    )
    assert tokenizer.eos_token_id is None
    tokenizer.save_pretrained(folder)


def write_prompts(file: Path, count: int, num_tokens: int, vocab_size: int = VOCABULARY) -> None:
    """Rows of `count` prompts of exactly `num_tokens` random tokens, in the format of `data.train_data`."""
    import random

    draw = random.Random(0)
    rows = []
    for _ in range(count):
        content = " ".join(f"w{draw.randrange(vocab_size)}" for _ in range(num_tokens))
        rows.append({"prompt": [{"role": "user", "content": content}], "env_class": DIGIT_SHARE})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
