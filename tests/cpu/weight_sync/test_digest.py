"""The digest that proves which bytes arrived."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.weight_sync import digest
from skyrl_train.weight_sync.bucket import TensorSpec, fill, num_bytes
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import compare, row_hashes
from tests.support.sending import bucket_digests, pack, tensor_digest


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def python_digest(data: bytes, dtype: str, shape: str) -> int:
    """The definition in the module's docstring, in plain Python integers."""
    import hashlib

    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def signed(z: int) -> int:
        return z - (1 << 64) if z >> 63 else z

    def mix_signed(z: int) -> int:  # the same with arithmetic shifts, as torch has them
        z = ((z ^ (signed(z) >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (signed(z) >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (signed(z) >> 31)) & mask

    data += bytes(-len(data) % 1024)
    total = 0
    for row in range(len(data) // 1024):
        row_hash = 0
        for column in range(128):
            start = row * 1024 + column * 8
            word = int.from_bytes(data[start : start + 8], "little", signed=True)
            weight = mix(0x9E3779B97F4A7C15 * (column + 1) & mask) | 1
            row_hash += (word ^ (word >> 29)) * weight
        total += mix_signed((row_hash + 0x9E3779B97F4A7C15 * (row + 1)) & mask)
    header = int.from_bytes(hashlib.blake2b((dtype + shape).encode(), digest_size=8).digest(), "little")
    return (total & mask) ^ header


@pytest.mark.parametrize("shape", [(1,), (128, 3), (2, 1024)])
def test_the_digest_is_the_sum_of_mixed_row_hashes(shape):
    tensor = weights(*shape)
    assert tensor_digest(tensor) == python_digest(tensor.numpy().tobytes(), "torch.float32", str(tuple(shape)))


@pytest.mark.parametrize("rows_at_once", [1, 2, 5, 100])
def test_digests_do_not_depend_on_where_the_rows_are_cut(rows_at_once: int, monkeypatch: pytest.MonkeyPatch):
    """Tensors of 3, 1, 5 and 1 rows in two buckets, also where a tensor is in both."""
    tensors = [weights(3, 256), weights(7, seed=1), weights(5, 256, seed=2), weights(256, seed=3)]
    specs = [TensorSpec(str(index), tensor.dtype, tuple(tensor.shape)) for index, tensor in enumerate(tensors)]
    bucket = fill(specs, tensors, torch.empty(num_bytes(specs), dtype=torch.uint8))
    hashes = row_hashes(bucket.data)
    monkeypatch.setattr(digest, "ROWS_AT_ONCE", rows_at_once)
    for cut in ([10], [4, 6], [2, 1, 7], [1] * 10):
        found = digest.digests(specs, list(hashes.split(cut)))
        assert list(found.values()) == [tensor_digest(tensor) for tensor in tensors]
    assert digest.digests([], []) == {}


@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0, 0.5]), min_size=2, max_size=600),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
@settings(max_examples=300, deadline=None)
def test_swapping_two_elements_changes_the_digest(values, data, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    i = data.draw(st.integers(0, len(values) - 1))
    j = data.draw(st.integers(0, len(values) - 1))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    assert (tensor_digest(swapped) == tensor_digest(tensor)) == torch.equal(swapped, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t().contiguous(),
        lambda w: w.flip(0),
        lambda w: w.flip(1),
        lambda w: w.roll(1, 0),
        lambda w: torch.cat([w[:, 256:], w[:, :256]], dim=1),
        lambda w: torch.cat([w[256:], w[:256]]),
        lambda w: w.view(8, 64, 512).transpose(0, 1).reshape(512, 512),
        lambda w: -w,
        lambda w: w.index_fill(0, torch.tensor([511]), 0),
    ],
    ids=["transposed", "rows back to front", "columns back to front", "rolled", "columns halves", "row halves", "heads",
         "negated", "last row lost"],
)  # fmt: skip
def test_rearranged_weights_have_another_digest(change, dtype):
    tensor = weights(512, 512).to(dtype)
    assert tensor_digest(change(tensor)) != tensor_digest(tensor)


def test_a_single_bit_changes_the_digest():
    tensor = weights(64, 65)
    digest = tensor_digest(tensor)
    for position in (0, 7, 1024, 64 * 65 * 4 - 1):
        for bit in (0, 7):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[position] ^= 1 << bit
            assert tensor_digest(changed) != digest


def test_dtype_and_shape_are_part_of_the_digest():
    zeros = torch.zeros(8, 8)
    digests = [
        tensor_digest(other)
        for other in (zeros, zeros.view(64), zeros.view(4, 16), zeros.view(torch.int32), torch.zeros(8, 8, 1))
    ]
    assert len(set(digests)) == 5


def test_a_tensor_has_the_same_digest_in_every_bucket_and_layout():
    tensors = [(f"t{n}", weights(n, 37, seed=n)) for n in range(1, 40)]
    alone = {name: tensor_digest(tensor) for name, tensor in tensors}
    for bucket_bytes in (1024, 10_000, 1 << 20):
        digests: dict[str, int] = {}
        for bucket in pack(tensors, bucket_bytes):
            digests |= bucket_digests(bucket)
        assert digests == alone
    assert tensor_digest(weights(6, 7).t()) == tensor_digest(weights(6, 7).t().contiguous())


def test_more_rows_than_one_chunk_are_all_read():
    tensor = weights(3 * 1024, 256)
    changed = tensor.clone()
    changed[-1, -1] += 1
    assert tensor_digest(changed) != tensor_digest(tensor)


def test_empty_and_scalar_tensors_have_digests():
    assert tensor_digest(torch.empty(0)) != tensor_digest(torch.empty(0, 3))
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_equal_digests_compare_silently():
    compare({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}, "2 arrived with other bytes: a, b"),
        ({"a": 1, "b": 2}, {"a": 1}, "1 never arrived: b"),
        ({"a": 1}, {"a": 1, "c": 3}, "1 arrived but were not sent: c"),
        ({str(n): 1 for n in range(9)}, {}, "9 never arrived: 0, 1, 2 and 6 more"),
    ],
)
def test_a_difference_names_its_tensors(sent, received, message):
    with pytest.raises(WeightSyncError, match=message):
        compare(sent, received)
