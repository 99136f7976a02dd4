"""Sizes and digests of files, taken while they are written."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
import torch

from skyrl_train.file_sum import MIN_PARALLEL_BYTES, FileSum, SummingWriter, problems_of, sum_of

ABC = FileSum(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
"""The test vector of FIPS 180-4."""


def test_a_writer_and_a_reader_agree_with_the_standard(tmp_path: Path):
    writer = SummingWriter(stream := io.BytesIO())
    for part in (b"a", memoryview(b"bc")):
        writer.write(part)
    assert writer.close() == ABC and stream.getvalue() == b"abc"
    (tmp_path / "file").write_bytes(b"abc")
    assert sum_of(tmp_path / "file", durable=True) == ABC


def test_large_parts_are_hashed_in_their_order_beside_small_ones():
    parts = [bytes([number]) * (MIN_PARALLEL_BYTES + number if number % 2 else number) for number in range(9)]
    writer = SummingWriter(stream := io.BytesIO())
    for part in parts:
        writer.write(part)
    whole = b"".join(parts)
    assert writer.close() == FileSum(len(whole), hashlib.sha256(whole).hexdigest()) and stream.getvalue() == whole


def test_the_sum_of_what_torch_saves_is_that_of_its_file(tmp_path: Path):
    with (tmp_path / "file").open("wb") as stream:
        writer = SummingWriter(stream)
        torch.save({"large": torch.arange(100_000), "small": torch.ones(3), "empty": torch.ones(0)}, writer)
        written = writer.close()
    assert written == sum_of(tmp_path / "file")
    assert torch.equal(torch.load(tmp_path / "file", mmap=True)["large"], torch.arange(100_000))


def test_a_failed_write_is_raised_and_leaves_no_thread_reading_the_buffer():
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError("No space left on device")

    writer = SummingWriter(Full())
    with pytest.raises(OSError, match="No space left"):
        writer.write(bytes(MIN_PARALLEL_BYTES))
    assert writer.close().num_bytes == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"abd", "file has other bytes than were written"),
        (b"ab", "file has 2 bytes instead of 3"),
        (None, "file is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(content: bytes | None, problem: str, tmp_path: Path):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert problems_of(tmp_path, {"file": ABC})[0].startswith(problem)
    (tmp_path / "file").write_bytes(b"abc")
    assert problems_of(tmp_path, {"file": ABC}) == []
