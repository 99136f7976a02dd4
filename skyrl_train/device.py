"""The one place that asks "is there a GPU": device, backend, synchronisation, peak speed.

Imports torch inside the functions: the driver and the configuration use this module without paying for torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Dense bf16 peak in FLOP/s by a part of the device's name (NVIDIA data sheets, without sparsity).
PEAK_FLOPS = {
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
}


@functools.cache
def device_type() -> str:
    """ "cuda" or "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> torch.device:
    """The device of this process; a GPU worker sees its own GPU as number 0 of CUDA_VISIBLE_DEVICES."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def distributed_backend() -> str:
    """Backend for `torch.distributed`: gloo serves CPU tensors on a GPU machine as well."""
    return "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"


def few_channels(count: int, timeout: datetime.timedelta | None) -> Any:
    """Options of a process group (torch's `pg_options`) with at most `count` channels; None without a GPU.

    NCCL chooses up to 32 for its fastest collectives, and each has buffers of its own on the device: 8 MiB for sends
    over a network, which even a group of one rank gets, 12 MiB for each neighbour in a ring and in a tree, and 12 MiB
    for sends between two GPUs (https://github.com/NVIDIA/nccl/issues/1685 and 2363).
    """
    if device_type() == "cpu":
        return None
    import torch.distributed as dist

    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = count
    if timeout is not None:
        options._timeout = timeout  # torch warns of another one than the group's
    return options


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if device_type() == "cuda":
        import torch

        torch.cuda.synchronize()


def finish_computing() -> None:
    """Wait until the device has done what this thread's stream was asked; copies on streams of their own go on."""
    if device_type() == "cuda":
        import torch

        torch.cuda.current_stream().synchronize()


def empty_cache() -> None:
    """Give memory that tensors no longer use back to the system."""
    if device_type() == "cuda":
        import torch

        # cuBLAS's workspaces, of 32 MiB each, lie in torch's pages and keep them; the next product takes new ones.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    else:
        with contextlib.suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


_STACK_SIZE = 0
"""CU_LIMIT_STACK_SIZE in cuda.h."""


class KernelStacks:
    """The stacks of the device's threads, for which the driver keeps memory for as many threads as can run at once.

    An H200 takes 264 MiB for each KiB of them: 1,024 bytes in a new process, 1,984 once NCCL has run, so half a GiB of
    a process that computes nothing. A kernel that needs more than there is gets it ("cuCtxSetLimit" in the reference of
    CUDA's driver), but waits for all that runs; so they are taken again before a step begins.
    """

    def __init__(self) -> None:
        self._given_back: int | None = None

    @staticmethod
    def bytes_of_thread() -> int:
        """What each has now; 0 without a GPU."""
        value = ctypes.c_size_t()
        if device_type() == "cuda":
            _call_driver("cuCtxGetLimit", ctypes.byref(value), _STACK_SIZE)
        return value.value

    def give_back(self) -> None:
        """Waits until the device has done what it was asked. Nothing without a GPU, or if they are given back."""
        if device_type() == "cuda" and self._given_back is None:
            self._given_back = self.bytes_of_thread()
            _call_driver("cuCtxSetLimit", _STACK_SIZE, ctypes.c_size_t(0))

    def take_again(self) -> None:
        """As large as they were. Nothing if they were not given back."""
        if self._given_back is not None:
            _call_driver("cuCtxSetLimit", _STACK_SIZE, ctypes.c_size_t(self._given_back))
            self._given_back = None


def _call_driver(name: str, *arguments: Any) -> None:
    """A function of CUDA's driver that works on this thread's context."""
    synchronize()  # By which the context that torch has made is that of a new thread too.
    driver = ctypes.CDLL("libcuda.so.1")
    if code := getattr(driver, name)(*arguments):
        error = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(error))
        raise RuntimeError(f"{name} of CUDA's driver failed: {code}, {(error.value or b'unknown').decode()}")


class CopyStream:
    """A stream for copies that run while the device computes; without a GPU each is done when it was asked for."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._is_busy = False

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies that are asked for inside begin when what the device was asked before has ended."""
        if device_type() == "cpu":
            yield
            return
        import torch

        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._is_busy = True
        with torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """What the device is asked from now on begins when the copies have ended. The host does not wait."""
        if self._stream is not None and self._is_busy:
            import torch

            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_busy = False


PAGES = "expandable_segments:True,large_segment_size_mb:64"
"""Of 64 MiB: giving 60 GiB back takes an H200 52 ms then, and 186 ms in torch's own 20 MiB; mapping them 46 and 165 ms.
Larger ones stay more often because of something small in them."""
BLOCKS = "expandable_segments:False,large_segment_size_mb:20"
"""As torch has them if nothing is said."""


@functools.cache
def allocate_in_pages() -> bool:
    """Have torch map this process's device memory page by page ("expandable segments"); returns whether it does.

    Without it a small tensor that was cut from the block of a large one keeps all of the block: an offloaded policy of
    0.6 billion parameters held 8.6 GiB of an H200. What PYTORCH_ALLOC_CONF says stays, of pages too.
    """
    if device_type() == "cpu":
        return False
    given = _given_to_allocator()
    if "expandable_segments" in given:
        return "expandable_segments:True" in given
    _set_allocator(PAGES, given)
    return True


@contextlib.contextmanager
def memory_to_share() -> Iterator[None]:
    """What is allocated inside can be mapped by other processes (CUDA IPC), which pages cannot."""
    if not allocate_in_pages.cache_info().currsize or not allocate_in_pages():
        yield
        return
    given = _given_to_allocator()
    _set_allocator(given, BLOCKS)
    try:
        yield
    finally:
        _set_allocator("" if "expandable_segments" in given else PAGES, given)


def _given_to_allocator() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _set_allocator(*settings: str) -> None:
    """Of one option the last counts. What none of them names is as if nobody had said anything."""
    import torch

    binding: Any = torch._C
    binding._accelerator_setAllocatorSettings(",".join(filter(None, settings)))


def memory_in_use() -> dict[str, float]:
    """Bytes of this process: `allocated` by tensors and `reserved` for them; of its device: `free` and `total`.

    Without a GPU: the process's resident memory, twice, and the machine's.
    """
    if device_type() == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        held = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        return {name: float(value) for name, value in (held | {"free": free, "total": total}).items()}
    import psutil

    resident, machine = float(psutil.Process().memory_info().rss), psutil.virtual_memory()
    return {
        "allocated": resident,
        "reserved": resident,
        "free": float(machine.available),
        "total": float(machine.total),
    }


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of the device, None where it is not known."""
    if device_type() == "cpu":
        return None
    import torch

    return peak_flops_of(torch.cuda.get_device_name())


def peak_flops_of(name: str) -> float | None:
    """The same of a device with this name, as the driver tells it; None of a part of one (MIG)."""
    known = [part for part in PEAK_FLOPS if re.search(rf"\b{part}\b", name) and "MIG" not in name]
    return PEAK_FLOPS[max(known, key=len)] if known else None
