"""Rendezvous stores that listen on one address; torch's own listen on all interfaces."""

from __future__ import annotations

import errno
import logging
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from skyrl_train.ranks import Rendezvous

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address, or on all if no interface has it (NAT).

    Args: port: 0: a free one. Raises: OSError if the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            log.warning("%s is not on an interface of this host (a NAT address?): listening on all of them", host)
            listening.bind(("", port))
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening


def serve_store(listening: socket.socket, host: str, timeout_s: float, world_size: int | None = None) -> dist.TCPStore:
    """A store that serves at this socket, which it closes.

    Args: host: at which clients reach it; world_size: number of processes to wait for, this one included; None: do not
        wait.
    """
    import torch.distributed as dist  # a rank listens before it imports torch

    port: int = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=world_size is not None,
        master_listen_fd=listening.detach(),
    )


def join_store(rendezvous: Rendezvous) -> dist.Store:
    """The store of a worker group, which rank 0 serves. The others wait until it does, or has closed its socket: the
    caller sets the deadline.
    """
    import torch.distributed as dist

    address, port, size = rendezvous.address, rendezvous.port, rendezvous.world_size
    if rendezvous.rank == 0:
        return serve_store(rendezvous.listening or listen(address, port), address, rendezvous.timeout_s, size)
    return dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=rendezvous.timeout_s))
