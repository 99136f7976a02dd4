"""The transports by name. A new one is a file with its two ends, and a line here or its `module:attribute` in
generator.weight_sync_backend. Imports no torch: what a transport needs is checked before anything heavy starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, get_args

from skyrl_train.imports import imported

if TYPE_CHECKING:
    from skyrl_train.weight_sync.channels.channel import ReceiveChannel, ReceivingEnd, SendingEnd, WeightSender

Scope = Literal["own_stage", "first_stage", "every_stage"]
"""Sender of a pipeline stage's tensors: the stage's own first rank, the first stage's, or every rank."""
KEY = "generator.weight_sync_backend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Path of the weights from ranks to engines."""

    send: str
    """`module:function` that opens the end of a sender: SendingEnd -> WeightSender."""
    receive: str | None
    """`module:function` that opens the end of an engine's worker: ReceivingEnd -> ReceiveChannel; None for servers that
    bring their own."""
    scope: Scope = "own_stage"
    needs_gpus: bool = False
    shares_gpus: bool | None = None
    """True: a sender must share its GPU with an engine; False: it must not; None: it may."""
    for_stock_servers: bool = False
    """Whether unmodified vLLM servers are the receivers, and no others can be."""


_HERE = "skyrl_train.weight_sync.channels"
_STOCK = "skyrl_train.engines.remote.stock_nccl"
TRANSPORTS: dict[str, Transport] = {
    "shm": Transport(send=f"{_HERE}.shm:send", receive=f"{_HERE}.shm:receive"),
    "broadcast": Transport(send=f"{_HERE}.broadcast:send", receive=f"{_HERE}.broadcast:receive", shares_gpus=False),
    "cuda_ipc": Transport(
        send=f"{_HERE}.cuda_ipc:send",
        receive=f"{_HERE}.cuda_ipc:receive",
        scope="every_stage",
        needs_gpus=True,
        shares_gpus=True,
    ),
    "vllm_nccl": Transport(
        send=f"{_STOCK}:StockNcclSender", receive=None, scope="first_stage", needs_gpus=True, for_stock_servers=True
    ),
}
STOCK = "vllm_nccl"
"""The transport to unmodified servers."""


def transport(name: str) -> Transport:
    """Raises: ValueError with what generator.weight_sync_backend may be, or what is wrong with the user's own."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    if ":" not in name:
        allowed = ", ".join(["auto", *TRANSPORTS])
        raise ValueError(f"{KEY} is {name}: it must be one of {allowed}, or `module:attribute` of your own Transport")
    found = imported(KEY, name)
    if not isinstance(found, Transport):
        raise ValueError(f"{KEY} is {name}: it is a {type(found).__name__}. Make it a Transport of {__name__}")
    if found.scope not in get_args(Scope):
        raise ValueError(f"{KEY} is {name}: its scope is {found.scope}, allowed are {', '.join(get_args(Scope))}")
    for part, end in (("send", found.send), ("receive", found.receive)):
        if end is not None and not callable(imported(f"{part} of {KEY}={name}", end)):
            raise ValueError(f"{part} of {KEY}={name} is {end!r}: it is not a function")
    return found


def open_sender(name: str, end: SendingEnd) -> WeightSender:
    return resolve_name(transport(name).send)(end)


def open_receiver(end: ReceivingEnd) -> ReceiveChannel:
    """One worker's end; `end.info` names the transport. Blocks until the sender has answered."""
    receive = transport(end.info["transport"]).receive
    assert receive is not None, "servers of stock vLLM receive by themselves"
    return resolve_name(receive)(end)
