"""A run with the hooks of 0.4: which rows it checks, and how a trainer's hook sees its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.generators.types import GeneratorInterface
from skyrl_train.compat.run import HookedRun
from skyrl_train.config import load_config
from tests.support.scripted import prompt


@pytest.mark.parametrize(
    ("base", "method", "is_checked"),
    [
        (SkyRLGymGenerator, "mine", True),
        (SkyRLGymGenerator, "agent_loop", True),
        (SkyRLGymGenerator, "generate", False),
        (GeneratorInterface, "generate", False),
    ],
)
def test_the_environments_of_rows_are_checked_where_the_generator_plays_them(base: type, method: str, is_checked: bool):
    run: Any = HookedRun.__new__(HookedRun)
    kind = type("Own", (base,), {method: print})
    run._old = SimpleNamespace(generator=kind.__new__(kind))
    run.config, run.train_prompts, run.val_prompts = load_config([]), [prompt("null")], []
    if is_checked:
        with pytest.raises(ValueError, match="null"):
            run._check_environments()
    else:
        run._check_environments()
