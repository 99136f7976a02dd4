"""Rendezvous stores that listen on one address; torch's own listen on all interfaces."""

from __future__ import annotations

import errno
import logging
import socket
from datetime import timedelta

import torch.distributed as dist

from skyrl_train.ranks import Rendezvous

log = logging.getLogger(__name__)


def serve_store(host: str, port: int, timeout_s: float, world_size: int | None = None) -> dist.TCPStore:
    """A store that listens on this address, or on all if no interface has it (NAT).

    Args: port: 0: a free one; world_size: number of processes to wait for, this one included; None: do not wait.
    Raises: OSError if the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            log.warning("%s is not on an interface of this host (a NAT address?): listening on all of them", host)
            listening.bind(("", port))
        listening.listen()
        found: int = listening.getsockname()[1]
        return dist.TCPStore(
            host,
            found,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=world_size is not None,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def join_store(rendezvous: Rendezvous) -> dist.Store:
    """The store of a worker group: served by rank 0, joined by the others within the timeout."""
    if rendezvous.rank == 0:
        return serve_store(rendezvous.address, rendezvous.port, rendezvous.timeout_s, rendezvous.world_size)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    return dist.TCPStore(rendezvous.address, rendezvous.port, rendezvous.world_size, is_master=False, timeout=timeout)
