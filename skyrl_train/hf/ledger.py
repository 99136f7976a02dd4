"""The fields of a config.json, by model family: used, without effect on training, or refused with their value.

They are listed in `ledger.yaml`. Any other field is refused by its name, so a field that a publisher adds is never
ignored. That the used fields are computed correctly is checked with each model (megatron/verify/model_check.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Only:
    """Supported values of a field."""

    values: tuple[Any, ...]
    why: str
    """Reason why other values are refused."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Fields of one family, in addition to those of all families."""

    used: frozenset[str]
    only: Mapping[str, Only]
    rope_types: frozenset[str]
    rope_fields: frozenset[str]
    """Fields of `rope_parameters`, in addition to those of all families."""


def names(text: str | Sequence[Any]) -> frozenset[str]:
    """The words of a text, or of nested lists of texts."""
    return frozenset(text.split() if isinstance(text, str) else (name for part in text for name in names(part)))


def _only(fields: Mapping[str, Any]) -> dict[str, Only]:
    return {name: Only(tuple(field["values"]), field["why"]) for name, field in fields.items()}


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
USED, NO_EFFECT, ONLY = names(_FILE["used"]), names(_FILE["no_effect"]), _only(_FILE["only"])
ROPE_FIELDS = {kind: names(fields) for kind, fields in _FILE["rope_fields"].items()}
LEDGERS = {
    family: Ledger(
        names(fields.get("used", "")),
        _only(fields["only"]),
        frozenset(fields.get("rope_types", ROPE_FIELDS)),
        names(fields.get("rope_fields", "")),
    )
    for family, fields in _FILE["families"].items()
}
"""model_type -> its ledger: the families that can be trained."""
MAX_SHOWN = 60
"""Characters of a refused value in a message."""
ROPE_LENGTHS = "its frequencies change with the length of a sample, which is not built"
ROPE_REFUSED = {"dynamic": ROPE_LENGTHS, "longrope": ROPE_LENGTHS}


def config_problems(config: PretrainedConfig, given: Mapping[str, Any]) -> list[str]:
    """Everything in a configuration that would not be computed as Hugging Face computes it.

    Args: config: as read by transformers, of a family in LEDGERS; given: contents of config.json.
    """
    ledger = LEDGERS[config.model_type]
    unknown = [*_architecture(given), *_unknown(ledger, given)]
    return unknown or [*_values(ledger, config, given), *_rope(ledger, config), *_together(config)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _architecture(given: Mapping[str, Any]) -> Iterator[str]:
    for name in given.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            yield f"architectures is [{name}], and only models with a language-model head (...ForCausalLM) are built"


def _unknown(ledger: Ledger, given: Mapping[str, Any]) -> Iterator[str]:
    known = USED | NO_EFFECT | ONLY.keys() | ledger.used | ledger.only.keys() | {"architectures", "model_type"}
    for name in sorted(given.keys() - known):
        yield (
            f"{name} is {_short(given[name])}: unknown field for this family. If it does not change what the model "
            "computes, remove it from config.json"
        )


def _values(ledger: Ledger, config: PretrainedConfig, given: Mapping[str, Any]) -> Iterator[str]:
    for name, only in {**ONLY, **ledger.only}.items():
        if name in given or hasattr(config, name):
            value = getattr(config, name, given.get(name))
            if value not in only.values and not _reads_quantised(name, config):
                yield f"{name} is {_short(value)}: {only.why}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        yield f"layer_types has {sorted(kinds)}: its attention has a sliding window, which is not built"


def _reads_quantised(name: str, config: PretrainedConfig) -> bool:
    """Whether the field describes DeepSeek's FP8 weights with a scale per block, which are read and dequantised."""
    if name != "quantization_config" or config.model_type != "deepseek_v3":
        return False
    given = dict(config.quantization_config)
    block = given.get("weight_block_size")
    return given.get("quant_method") == "fp8" and isinstance(block, list) and len(block) == 2


def _rope(ledger: Ledger, config: PretrainedConfig) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ledger.rope_types:
        why = ROPE_REFUSED.get(kind, f"only {', '.join(sorted(ledger.rope_types))} are built for this family")
        yield f"rope_parameters.rope_type is {kind!r}: {why}"
        return
    known = ROPE_FIELDS[kind] | ledger.rope_fields | {"rope_type", "type", "rope_theta"}
    for name in sorted(rope.keys() - known):
        if rope[name] != 1.0 or name != "partial_rotary_factor":
            yield f"rope_parameters.{name} is {rope[name]!r}, which is not built for {kind!r} in this family"


def _together(config: PretrainedConfig) -> Iterator[str]:
    """Fields that are supported only with certain values of others."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    latent = getattr(config, "kv_lora_rank", None) is not None
    if latent and heads != kv_heads:
        yield f"num_key_value_heads is {kv_heads}: latent attention has as many as num_attention_heads {heads}"
    if latent and getattr(config, "head_dim", None) not in (None, config.qk_rope_head_dim):
        yield f"head_dim is {config.head_dim}: latent attention rotates qk_rope_head_dim {config.qk_rope_head_dim}"
    if latent:
        yield from _latent_yarn(config.rope_parameters or {})
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts is None:
        return
    chosen = config.num_experts_per_tok
    if chosen > experts:
        yield f"num_experts_per_tok is {chosen}, more than the {experts} experts"
    if chosen == 1 and getattr(config, "norm_topk_prob", True):
        yield "num_experts_per_tok is 1 with normalised weights: the only expert would always have the weight 1"
    if getattr(config, "routed_scaling_factor", 1.0) == 0:
        yield "routed_scaling_factor is 0: Megatron reads it as no scaling"
    groups, group_topk = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    if groups > 1 and chosen != 2 * group_topk:
        yield (
            f"num_experts_per_tok is {chosen} and topk_group {group_topk}: Megatron scores a group of experts by its "
            "best num_experts_per_tok / topk_group experts, Hugging Face always by its best 2"
        )


def _latent_yarn(rope: Mapping[str, Any]) -> Iterator[str]:
    if rope.get("rope_type") != "yarn":
        return
    if rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
        yield "rope_parameters.attention_factor and truncate are not built for latent attention"
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        yield (
            f"rope_parameters.mscale is {rope.get('mscale')} and mscale_all_dim {rope.get('mscale_all_dim')}: latent "
            "attention is built with both or neither"
        )
