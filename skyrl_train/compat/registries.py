"""skyrl_train 0.4's registries of policy losses and advantage estimators, over the tables of this project."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

from skyrl_train.algorithms.tables import ADVANTAGES, LOSSES, Table
from skyrl_train.compat.estimators import Estimator
from skyrl_train.compat.losses import PolicyLoss

F = TypeVar("F", bound=Callable[..., Any])


class PolicyLossType(StrEnum):
    """Names of 0.4's losses."""

    REGULAR = "regular"
    DUAL_CLIP = "dual_clip"
    GSPO = "gspo"
    CISPO = "cispo"
    CLIP_COV = "clip_cov"
    KL_COV = "kl_cov"
    SAPO = "sapo"
    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"


class AdvantageEstimator(StrEnum):
    """Names of 0.4's estimators."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce++"


class _Registry:
    table: ClassVar[Table]
    adapter: ClassVar[type[PolicyLoss] | type[Estimator]]
    built_in: ClassVar[type[Enum]]
    _own: ClassVar[dict[str, Callable[..., Any]]]

    @classmethod
    def register(cls, name: str | Enum, func: Callable[..., Any]) -> None:
        """Add a function; it replaces one that only this project has. Raises: ValueError if 0.4 has the name, or
        another function was registered.
        """
        name = _text(name)
        is_taken = name in cls._own and _origin(cls._own[name]) != _origin(func)
        if is_taken or name in [each.value for each in cls.built_in]:
            raise ValueError(f"{cls.table.key}: {name} is already registered. Choose another name")
        cls._own[name] = func
        adapted = cls.adapter(func)
        adapted.__module__ = _registering_module()
        cls.table.register(name, adapted, replaces=True)

    @classmethod
    def get(cls, name: str | Enum) -> Callable[..., Any]:
        """The function that was registered. Raises: ValueError."""
        if _text(name) not in cls._own:
            raise ValueError(
                f"{_text(name)} is not a registered function: {', '.join(cls._own) or 'there are none'}. The built-in "
                f"ones take other arguments, and are functions of {cls.table.key}"
            )
        return cls._own[_text(name)]

    @classmethod
    def list_available(cls) -> list[str]:
        return list(cls.table)

    @classmethod
    def sync_with_actor(cls) -> None:
        """Nothing to do: every process imports the modules that register (`initialize_ray`)."""


class PolicyLossRegistry(_Registry):
    table, adapter, built_in, _own = LOSSES, PolicyLoss, PolicyLossType, {}


class AdvantageEstimatorRegistry(_Registry):
    table, adapter, built_in, _own = ADVANTAGES, Estimator, AdvantageEstimator, {}


def register_policy_loss(name: str | Enum) -> Callable[[F], F]:
    return _decorator(PolicyLossRegistry, name)


def register_advantage_estimator(name: str | Enum) -> Callable[[F], F]:
    return _decorator(AdvantageEstimatorRegistry, name)


def sync_registries() -> None:
    """Nothing to do, like `sync_with_actor`."""


def registering_modules() -> list[str]:
    """Modules that have registered functions, by names that other processes can import.

    Raises: ValueError for a main program without one, such as a notebook.
    """
    registries = (PolicyLossRegistry, AdvantageEstimatorRegistry)
    places = ((name, registry.table.place(name)) for registry in registries for name in registry._own)
    return list(dict.fromkeys(_importable(name, module) for name, module in places if module is not None))


def _registering_module() -> str:
    """The module that calls this one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return "__main__" if frame is None else str(frame.f_globals.get("__name__"))


def _importable(function: str, module: str) -> str:
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is None and file is None:
        raise ValueError(f"{function} is registered in a program without a file. Put it into a module, and import that")
    name = str(spec.name) if spec is not None else Path(str(file)).stem
    sys.modules.setdefault(name, main)  # this process has executed it already
    return name


def _decorator(registry: type[_Registry], name: str | Enum) -> Callable[[F], F]:
    def register(function: F) -> F:
        registry.register(name, function)
        return function

    return register


def _text(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _origin(function: Callable[..., Any]) -> object:
    """Identity shared by a function of the main program and the one of its module."""
    if isinstance(function, partial):
        return _origin(function.func), function.args, function.keywords
    code = getattr(function, "__code__", None)
    return function if code is None else (code.co_filename, function.__qualname__)
