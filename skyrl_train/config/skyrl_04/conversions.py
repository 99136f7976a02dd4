"""Values of skyrl_train 0.4 as values of the key that they become: the functions that table.yaml names `$NAME`.

Each gets the value and the other keys (key -> value).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's fused layers -> Hugging Face's modules."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-]+")


def _each(value: Any, change: Callable[[str], tuple[str, ...]]) -> Any:
    """The list of what each text becomes; `value` itself if nothing changes."""
    given = value if isinstance(value, list) else [value]
    changed = [part for each in given for part in (change(each) if isinstance(each, str) else (each,))]
    return value if changed == given else changed


def same_value(value: Any, given: Mapping[str, Any]) -> Any:
    return value


def hugging_face_modules(value: Any, given: Mapping[str, Any]) -> Any:
    return _each(value, lambda name: FUSED.get(name, (name,)))


def with_scheme(value: Any, given: Mapping[str, Any]) -> Any:
    return _each(value, lambda url: (url if "://" in url else f"http://{url}",))


def hub_split(value: Any, given: Mapping[str, Any]) -> Any:
    """0.4 reads the split `train` of a data set of the hub that is named without one."""

    def named(source: str) -> tuple[str]:
        is_hub_name = HUB_NAME.fullmatch(source) is not None and not Path(source).exists()
        return (f"{source}:train" if is_hub_name else source,)

    return _each(value, named)


def minus_one_below_one(value: Any, given: Mapping[str, Any]) -> Any:
    return -1 if type(value) is int and value < 1 else value


def times_num_inference_engines(value: Any, given: Mapping[str, Any]) -> Any:
    num_engines = given.get("generator.num_inference_engines", 1)
    return value * num_engines if type(value) is int and type(num_engines) is int else value


def batches_ahead(value: Any, given: Mapping[str, Any]) -> Any:
    """Groups in flight, less those of the step that is trained next, in batches; at most the staleness allows."""
    batch = given.get("trainer.train_batch_size")
    staleness = given.get("trainer.fully_async.max_staleness_steps")
    if type(value) is not int or type(batch) is not int or batch < 1:
        return None
    ahead = max(1, -(-value // batch) - 1)
    return min(ahead, staleness) if type(staleness) is int else 1


CONVERSIONS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "$value": same_value,
    **{
        f"${function.__name__}": function
        for function in (
            *(hugging_face_modules, with_scheme, hub_split),
            *(minus_one_below_one, times_num_inference_engines, batches_ahead),
        )
    },
}
