"""Imports by name, and faster imports of large libraries."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_train.spelling import nearest

_sources: dict[str, tuple[object, bytes | None]] = {}
"""Module -> its spec, which another import or a reload replaces, and the source that this process first found."""


def own_module(name: str) -> ModuleType:
    """Import a module of the user's, and note its source for `require_unedited`."""
    module = importlib.import_module(name)
    spec = getattr(module, "__spec__", None)  # anything may be in sys.modules
    if name not in _sources or _sources[name][0] is not spec:
        _sources[name] = spec, _source(module)
    return module


def require_unedited(name: str) -> None:
    """Raises: ValueError if the file of an own module has changed since its import. Ranks and engines would import the
    new code. It is not reloaded here: what it has registered, its objects and modules that import from it stay old.
    """
    if name not in _sources:
        return
    module = own_module(name)  # which the user may have reloaded
    if _source(module) != _sources[name][1]:
        raise ValueError(
            f"{name} ({module.__file__}) was edited after this process imported it: ranks and engines would run the "
            "new code, and this process the old. Restart the kernel of the notebook, or the program"
        )


def _source(module: ModuleType) -> bytes | None:
    """The module's file; None if it has none."""
    try:
        return Path(getattr(module, "__file__", None) or "").read_bytes()
    except OSError:
        return None


def reason_of(error: BaseException) -> str:
    """Why a module could not be imported."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    return f"{type(error).__name__}: {error}"


def imported(key: str, name: str) -> Any:
    """Import the `module:attribute` in `name`. Args: key: its key in the configuration, for the error.

    Raises: ValueError that describes the problem of the name, the import or the module's code.
    """
    module, colon, wanted = name.partition(":")
    if not (module and colon and wanted):
        raise ValueError(f"{key} is {name!r}: write module:attribute")
    try:
        found = own_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ValueError(
            f"{key} is {name!r}, and {module} cannot be imported ({reason_of(error)}). The module must be "
            "installed, in the working directory or on PYTHONPATH"
        ) from error
    if not hasattr(found, wanted):
        require_unedited(module)
        close = nearest(wanted, vars(found))
        meant = f": did you mean {close}?" if close else ""
        raise ValueError(f"{key} is {name!r}, and {module} ({found.__file__}) has no {wanted}{meant}")
    return getattr(found, wanted)


@cache
def declared_fields(*names: str) -> frozenset[str]:
    """Fields of dataclasses, `module:Class` each, read from the source: importing vLLM or Megatron takes seconds.

    Args: names: all classes of one hierarchy. Returns: an empty set if the hierarchy differs in the installed version,
        or the package is not installed here.
    """
    fields: set[str] = set()
    classes = [name.partition(":")[2] for name in names]
    for name, kind in zip(names, classes, strict=True):
        package, *path = name.partition(":")[0].split(".")
        spec = importlib.util.find_spec(package)
        files = [Path(folder, *path).with_suffix(".py") for folder in (spec and spec.submodule_search_locations) or ()]
        nodes = [node for file in files if file.is_file() for node in ast.parse(file.read_text()).body]
        found = next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind), None)
        if found is None or any(ast.unparse(base) not in classes for base in found.bases):
            return frozenset()
        fields |= {ast.unparse(each.target) for each in found.body if isinstance(each, ast.AnnAssign)}
    return frozenset(fields)


def require_working_torchvision() -> None:
    """Raises: ValueError if torchvision is installed and cannot be imported.

    transformers and vLLM import any torchvision that they find, for models of images; with a build for another torch
    they report the model's class as missing.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # RuntimeError, ImportError or OSError, by what does not fit
        raise ValueError(
            f"torchvision cannot be imported ({error}): its build does not fit the installed torch. Run `pip uninstall "
            "torchvision torchaudio torchcodec`, which skyrl_train does not need, or install the build for this torch"
        ) from error


@contextlib.contextmanager
def quick_imports(*, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Disable garbage collection during imports in the body, and hide optional libraries.

    Imported definitions live as long as the process, and the collector would traverse them repeatedly (a fifth of the
    import time of vLLM, Megatron or transformers) and at exit (a second). Objects that exist at the end of a process's
    first such block are exempt from collection for good, so it should come early.

    Args: without: top-level modules that cannot be imported in the body, unless they have been before.
    """
    hidden = [name for name in without if name not in sys.modules]
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes `import` fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        # Once: garbage of the running program before a later block must be collected.
        if len(sys.modules) > num_modules and gc.get_freeze_count() == 0:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def megatron_imports() -> Iterator[None]:
    """Quick imports for Megatron: without wandb, to which no rank logs, and without Inductor, a quarter of the time.

    `torch.compile` imports that where it decorates a function. In the body it does so at the function's first call.
    """
    import torch

    compile_now = torch.compile

    def decorate(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(decorate, **options)
        compiled = cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

        return call

    torch.compile = decorate  # type: ignore[assignment]
    try:
        with quick_imports(without=("wandb",)):
            yield
    finally:
        torch.compile = compile_now
