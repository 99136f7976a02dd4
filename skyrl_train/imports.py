"""Imports by name, and of large libraries in less time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any


def imported(key: str, name: str) -> Any:
    """What `module:attribute` names. Args: key: of the configuration, for the error.

    Raises: ValueError that says what is wrong with the name, the import or the module's code.
    """
    module, colon, wanted = name.partition(":")
    if not (module and colon and wanted):
        raise ValueError(f"{key} is {name!r}: write module:attribute")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{key} is {name!r}, and {module} cannot be imported ({type(error).__name__}: {error}). The module must be "
            "installed, in the working directory or on PYTHONPATH"
        ) from error
    if not hasattr(found, wanted):
        raise ValueError(f"{key} is {name!r}, and {module} ({found.__file__}) has no {wanted}")
    return getattr(found, wanted)


def attribute(path: str) -> Any:
    """What a `module:attribute` of the package itself names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def quick_imports(*, without: tuple[str, ...] = ()) -> Iterator[None]:
    """Import in this block without the garbage collector, and without libraries that others import if they are there.

    What an import defines lives as long as the process, and the collector would look through all of it again and again
    (a fifth of the time that vLLM, Megatron or transformers take), then now and then, and once more when the process
    ends (a second). It does not look at what is there at the end of a process's first such block any more, which should
    come early: a reference cycle that the program itself has made until then is never collected either.

    Args: without: top-level modules that cannot be imported in this block, unless they have been before.
    """
    hidden = [name for name in without if name not in sys.modules]
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: `import` says that there is none
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        # Once: what a running program leaves behind before a later block must be collected.
        if len(sys.modules) > num_modules and gc.get_freeze_count() == 0:
            gc.freeze()
        if was_enabled:
            gc.enable()
