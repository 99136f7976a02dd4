"""Checkpoints of real model shapes with random weights, made on the spot: speed does not depend on what they know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
DIGIT_SHARE = "benchmarks.lib.digit_share:DigitShare"
MAX_SHARD_BYTES = 4 * 2**30
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""Name -> fields of the Hugging Face configuration, as the models on the hub have them."""


def model_config(shape: str, num_layers: int | None = None, max_positions: int = 40_960) -> Any:
    """Raises: KeyError for an unknown shape."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    fields = {"head_dim": 128, "vocab_size": VOCABULARY, **SHAPES[shape]}
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    kind = Qwen3MoeConfig if "num_experts" in fields else Qwen3Config
    return kind(
        **fields,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        dtype="bfloat16",
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


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
