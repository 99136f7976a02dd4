"""A 64-bit digest per tensor: equal on every device, and cheap enough for every sync.

The bytes of a tensor are read as rows of 128 words of 64 bits (`bucket.ALIGNMENT` bytes, zero padded). A row's hash
is the sum of its words times a fixed odd weight per column, modulo 2**64; the tensor's digest is the sum of the row
hashes, each mixed with its row number, and its dtype and shape. All of it is exact integer arithmetic, so neither the
device nor the order of summation matters. Moving a row, a column or a single element changes the digest.

Measured on one AVX-512 core: 8 GB/s; SHA-256 has 2 GB/s and memcpy 20 GB/s.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_train.weight_sync.bucket import ALIGNMENT, TensorSpec, fill, num_bytes, offsets
from skyrl_train.weight_sync.control import WeightSyncError

WORDS_PER_ROW = ALIGNMENT // 8
ROWS_PER_CHUNK = 1024
"""1 MiB on a CPU, so that the temporary stays in the core's cache; 256 rows are 5 % slower, whole tensors 4x."""
ROWS_AT_ONCE = 1 << 23
"""Rows, of 8 GiB of tensors, whose hashes are mixed together, which takes about five times their memory."""
MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """splitmix64 of one Python integer (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


@functools.cache
def _column_weights(device: torch.device) -> Tensor:
    """[WORDS_PER_ROW] int64, odd, so that a change of one word always changes its row's hash."""
    weights = [_signed(_mix(_GOLDEN * (column + 1) & MASK) | 1) for column in range(WORDS_PER_ROW)]
    return torch.tensor(weights, dtype=torch.int64, device=device)


def row_hashes(data: Tensor) -> Tensor:
    """[R * ALIGNMENT] uint8 -> [R] int64. One pass; on a GPU one kernel, and no wait for the device.

    The xor with a shifted copy carries the top bits of a word to its middle: times an even difference of two weights
    they would vanish modulo 2**64, and a swap of x and -x in one row would not be detected.
    """
    words = data.view(torch.int64).view(-1, WORDS_PER_ROW)
    weights = _column_weights(words.device)
    if words.is_cuda:
        from skyrl_train.kernels import row_hashes as kernel  # triton is installed with GPUs only

        return kernel.row_hashes(words, weights)
    hashes = torch.empty(len(words), dtype=torch.int64)
    room = torch.empty_like(words[:ROWS_PER_CHUNK])
    for start in range(0, len(words), ROWS_PER_CHUNK):
        part = words[start : start + ROWS_PER_CHUNK]
        mixed = torch.bitwise_right_shift(part, 29, out=room[: len(part)])
        mixed.bitwise_xor_(part).mul_(weights)
        torch.sum(mixed, dim=1, out=hashes[start : start + ROWS_PER_CHUNK])
    return hashes


def digests(specs: Sequence[TensorSpec], hashes: Sequence[Tensor]) -> dict[str, int]:
    """name -> digest in [0, 2**64). Waits for the device.
    Args: hashes: [R] each, of the tensors' rows, end to end, cut anywhere.
    """
    if not hashes:
        return {}
    device = hashes[0].device
    bounds = torch.tensor(offsets(specs), device=device) // ALIGNMENT
    sums = torch.zeros(len(specs), dtype=torch.int64, device=device)
    first = 0
    for rows in _joined(hashes):
        inside = (bounds - first).clamp_(0, len(rows))
        own_first = torch.repeat_interleave(bounds[:-1] - first, inside.diff(), output_size=len(rows))
        numbers = torch.arange(1, len(rows) + 1, device=device).sub_(own_first)
        mixed = numbers.mul_(_signed(_GOLDEN)).add_(rows)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed.bitwise_xor_(mixed >> shift).mul_(_signed(factor))
        mixed.bitwise_xor_(mixed >> 31)
        until = torch.zeros(len(rows) + 1, dtype=torch.int64, device=device)
        torch.cumsum(mixed, dim=0, out=until[1:])
        sums += until[inside].diff()
        first += len(rows)
    return {
        spec.name: (value ^ _header(spec.dtype, spec.shape)) & MASK
        for spec, value in zip(specs, sums.tolist(), strict=True)
    }


def _joined(hashes: Sequence[Tensor]) -> Iterator[Tensor]:
    """The hashes in fewer tensors, of at most ROWS_AT_ONCE rows unless one alone has more."""
    parts: list[Tensor] = []
    for part in hashes:
        if parts and sum(map(len, parts)) + len(part) > ROWS_AT_ONCE:
            yield torch.cat(parts)
            parts = []
        parts.append(part)
    yield torch.cat(parts)


def warm_up(device: torch.device) -> None:
    """Launch the kernels of a bucket once: the first launches in a process take half a second."""
    tensor = torch.zeros(1, dtype=torch.bfloat16, device=device)
    specs = (TensorSpec("", tensor.dtype, (1,)),) * 2
    bucket = fill(specs, [tensor] * 2, torch.empty(num_bytes(specs), dtype=torch.uint8, device=device))
    digests(specs * 2, [row_hashes(bucket.data)] * 2)


@functools.cache
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    text = f"{dtype}{shape}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def compare(sent: Mapping[str, int], received: Mapping[str, int]) -> None:
    """Raises: WeightSyncError naming the first tensors that differ, are missing or were not sent."""
    faults = {
        "arrived with other bytes": [name for name in sent if name in received and sent[name] != received[name]],
        "never arrived": [name for name in sent if name not in received],
        "arrived but were not sent": [name for name in received if name not in sent],
    }
    found = [f"{len(names)} {what}: {name_list(names)}" for what, names in faults.items() if names]
    if found:
        raise WeightSyncError(f"weights differ from what was sent ({len(sent)} tensors): " + "; ".join(found))


def check_reports(reports: Sequence[Mapping[str, Any]], sent: Mapping[str, int], receiver: str) -> None:
    """Check that the workers of an engine received and loaded what was sent.
    Args: reports: digests and faults of every worker; receiver: its name in errors.
    Raises: WeightSyncError naming tensors that differ, are missing or unknown to the engine, or incomplete layers.
    """
    for report in reports:
        compare(sent, report["digests"])
        if report["faults"]:
            raise WeightSyncError(f"the {receiver} could not load all weights: " + "; ".join(report["faults"]))


def name_list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
