"""The padding token's row of the embedding, which Hugging Face's lookup never trains.

Hugging Face builds `nn.Embedding(..., padding_idx=pad_token_id)`: where a sample has this token (models pad with their
end of sequence, for example), its lookup adds nothing to the gradient. A tied head still trains the row. Checkpoints
keep the row at 0, where a norm makes the gradient of a lookup about a thousand times too large.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import PretrainedConfig


def leave_padding_untrained(model: GPTModel, hf_config: PretrainedConfig) -> None:
    """Keep the gradient of lookups of the padding token from the embedding, where the model has one."""
    padding = getattr(hf_config, "pad_token_id", None)
    if padding is None or not model.pre_process:
        return
    token = padding if padding >= 0 else hf_config.vocab_size + padding  # as nn.Embedding counts

    def mask_gradient(embedding: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        if out.requires_grad:
            is_padding = args[0] == token  # [batch, tokens], as is the output
            if embedding.reduce_scatter_embeddings:  # the output is this rank's part of [tokens, batch]
                group = embedding.tp_group
                is_padding = is_padding.t().chunk(group.size())[group.rank()]
            out.register_hook(lambda gradient: gradient.masked_fill(is_padding.unsqueeze(-1), 0))

    model.embedding.word_embeddings.register_forward_hook(mask_gradient)
