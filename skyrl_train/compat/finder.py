"""Modules of skyrl_train 0.4 that are names alone: `modules.py` says where each name is here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from skyrl_train.compat.modules import ADDED, OLD, REFUSED


class OldModules(MetaPathFinder, Loader):
    """Finds the modules of 0.4, and adds names of 0.4 to modules that exist here too; names are imported when used."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("skyrl_train."):
            return None
        if name in REFUSED:
            raise ImportError(f"{name} is a module of skyrl_train 0.4 that is not served: {REFUSED[name]}")
        if name in OLD:
            return ModuleSpec(name, self, is_package=any(other.startswith(f"{name}.") for other in OLD))
        if name not in ADDED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                module.__dict__["__getattr__"] = _lookup(name, ADDED[name])

            spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        names = OLD[module.__name__]
        module.__doc__ = "Names of skyrl_train 0.4 (skyrl_train/compat)."
        module.__dict__["__getattr__"] = _lookup(module.__name__, names)
        module.__dict__["__all__"] = [name for name, place in names.items() if not place.startswith("!")]


def _lookup(module: str, names: Mapping[str, str]) -> Any:
    def find(name: str) -> Any:
        place = names.get(name)
        if place is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if place.startswith("!"):
            raise ImportError(f"{module}.{name} of skyrl_train 0.4 is not served: {place[1:]}")
        found = resolve_name(f"skyrl_train.{place}")
        sys.modules[module].__dict__[name] = found
        return found

    return find


def install() -> None:
    """Make the modules of 0.4 importable in this process."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldModules())
        importlib.invalidate_caches()
