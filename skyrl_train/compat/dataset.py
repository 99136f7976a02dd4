"""skyrl_train 0.4's data sets and the prompts of this project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.data.mapping import RowMapping
from skyrl_train.data.prompts import load_prompts
from skyrl_train.types import Prompt

Item = tuple[Any, str | None, dict[str, Any], str]
"""(messages, env_class, extras, uid)"""
NAMES = ("prompt", "env_class", "env_extras", "uid")
"""What a data set's `collate_fn` calls them."""


class PromptDataset:
    """Rows of files or hub data sets, without those whose prompt is too long."""

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: Any,
        max_prompt_length: int,
        num_workers: int = 8,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
    ) -> None:
        """Args: num_workers: not used. Raises: like `load_prompts`."""
        keys = {"prompt": prompt_key, "env_class": env_class_key}
        renamed = {name: key for name, key in keys.items() if key != name}
        self.prompts = load_prompts(
            [datasets] if isinstance(datasets, str) else list(datasets),
            tokenizer=tokenizer,
            max_prompt_length=max_prompt_length,
            default_env_class="",
            chat_template_kwargs={},
            mapping=RowMapping(columns=renamed),
        ).prompts

    @classmethod
    def of(cls, prompts: list[Prompt]) -> PromptDataset:
        dataset = cls.__new__(cls)
        dataset.prompts = prompts
        return dataset

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Item:
        prompt = self.prompts[index]
        return prompt.messages, prompt.env_class, prompt.extras, prompt.uid

    def collate_fn(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        return [dict(zip(NAMES, item, strict=True)) for item in items]


def prompts_of(dataset: Any, default_env_class: str) -> list[Prompt]:
    """The rows of a data set of 0.4's contract, in the form of its `collate_fn` where it has one; none of None."""
    rows = [] if dataset is None else [dataset[index] for index in range(len(dataset))]
    if (collate := getattr(dataset, "collate_fn", None)) is not None:
        rows = [tuple(row[name] for name in NAMES) for row in collate(rows)]
    own = dataset.prompts if isinstance(dataset, PromptDataset) else []
    locations = {prompt.uid: prompt.location for prompt in own}
    return [
        Prompt(
            str(uid),
            messages,
            env_class or default_env_class,
            dict(extras or {}),
            _data_source(extras),
            locations.get(uid, ""),
        )
        for messages, env_class, extras, uid in rows
    ]


def _data_source(extras: dict[str, Any] | None) -> str:
    return str((extras or {}).get("data_source") or "unknown")
