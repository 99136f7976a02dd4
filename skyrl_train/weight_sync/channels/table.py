"""The channels by name."""

from __future__ import annotations

import torch

from skyrl_train.weight_sync.channels.broadcast import BroadcastReceiveChannel, BroadcastSendChannel
from skyrl_train.weight_sync.channels.channel import ReceiveChannel, SendChannel
from skyrl_train.weight_sync.channels.cuda_ipc import CudaIpcReceiveChannel, CudaIpcSendChannel
from skyrl_train.weight_sync.channels.shm import ShmReceiveChannel, ShmSendChannel
from skyrl_train.weight_sync.control import ControlMessage


def send_channel(name: str, num_receivers: int, device: torch.device, timeout_s: float, host: str) -> SendChannel:
    """Args: num_receivers counts every worker of every engine; host is this machine's address as they see it."""
    if name == "shm":
        return ShmSendChannel(num_receivers, timeout_s)
    if name == "broadcast":
        return BroadcastSendChannel(num_receivers, device, timeout_s, host)
    if name == "cuda_ipc":
        return CudaIpcSendChannel(timeout_s)
    raise ValueError(f"weight channel {name!r} is unknown; it is shm, broadcast or cuda_ipc")


def receive_channel(init_info: ControlMessage, worker_rank: int, device: torch.device) -> ReceiveChannel:
    """Args: init_info is the sender's with `timeout_s` (plus `rank_offset` for a broadcast); worker_rank counts the
    workers of this engine from 0."""
    timeout_s = init_info["timeout_s"]
    if init_info["transport"] == "shm":
        return ShmReceiveChannel(init_info, timeout_s)
    if init_info["transport"] == "broadcast":
        return BroadcastReceiveChannel(init_info, worker_rank, device, timeout_s)
    if init_info["transport"] == "cuda_ipc":
        return CudaIpcReceiveChannel(init_info, timeout_s)
    raise ValueError(f"weight channel {init_info['transport']!r} is unknown; it is shm, broadcast or cuda_ipc")
