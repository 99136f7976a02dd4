"""Process of a rank or an engine: a Ray actor that makes one object and forwards calls to it.

The object's constructor must not fail: Ray keeps only the stack's text of an error in an actor's constructor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from skyrl_train.cluster.out_of_memory import is_out_of_memory, out_of_memory
from skyrl_train.cluster.process import log_to, talk_through_node_address, use_devices
from skyrl_train.imports import attribute


class Host:
    """Runs one call at a time."""

    def __init__(self, entry_point: str, log_path: str, visible_devices: str | None) -> None:
        """Args: entry_point: `module:Class`, made with the path of the log; visible_devices: None for Ray's choice."""
        use_devices(visible_devices)
        log_to(log_path)
        talk_through_node_address()
        self._object: Any = attribute(entry_point)(log_path)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._object, method)(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(error) from error
            raise

    def call_and_keep(self, method: str, *args: Any) -> tuple[None, Any]:
        """Like `call`; the driver waits for the first result and passes a reference to the second on."""
        return None, self.call(method, *args)


class AsyncHost(Host):
    """Runs many calls at once, of an object whose methods are coroutines."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await super().call(method, *args, **kwargs)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Yield the items of an asynchronous generator of the object."""
        items = super().call(method, *args)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()
