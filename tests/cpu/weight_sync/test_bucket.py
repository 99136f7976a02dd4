"""Packing named tensors into flat buckets and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.weight_sync.bucket import (
    ALIGNMENT,
    Bucket,
    TensorSpec,
    fill,
    next_tensors,
    num_bytes,
    offsets,
    plan_buckets,
    unpack,
)
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.sending import pack, specs_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    return (values * 3).to(dtype)


named_tensors = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 17), max_size=3)), min_size=0, max_size=12
).map(lambda entries: [(f"t{n}", random_tensor(tuple(shape), dtype, n)) for n, (dtype, shape) in enumerate(entries)])


@given(named_tensors, st.sampled_from([ALIGNMENT, 3 * ALIGNMENT, 100_000]))
@settings(max_examples=60, deadline=None)
def test_unpacking_restores_names_order_and_bytes(tensors, bucket_bytes):
    buckets = list(pack(tensors, bucket_bytes))
    received = [pair for bucket in buckets for pair in unpack(bucket)]
    assert [name for name, _ in received] == [name for name, _ in tensors]
    for (_, sent), (_, got) in zip(tensors, received, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert torch.equal(bits(got), bits(sent))


@given(named_tensors, st.sampled_from([ALIGNMENT, 4 * ALIGNMENT]))
@settings(max_examples=60, deadline=None)
def test_only_a_bucket_of_one_tensor_exceeds_the_size(tensors, bucket_bytes):
    for bucket in pack(tensors, bucket_bytes):
        assert len(bucket.data) <= bucket_bytes or len(bucket.specs) == 1
        assert len(bucket.data) == offsets(bucket.specs)[-1]


def test_buckets_are_filled_in_order_and_a_large_tensor_travels_alone():
    kib = torch.zeros(1024, dtype=torch.uint8)
    tensors = [("a", kib), ("b", kib), ("large", kib.repeat(5)), ("c", kib), ("d", kib), ("e", kib), ("f", kib)]
    names = [[spec.name for spec in bucket.specs] for bucket in pack(tensors, 3 * 1024)]
    assert names == [["a", "b"], ["large"], ["c", "d", "e"], ["f"]]


def test_each_tensor_starts_at_a_multiple_of_the_alignment():
    specs = (
        TensorSpec("a", torch.float32, (3,)),
        TensorSpec("b", torch.bfloat16, (600,)),
        TensorSpec("c", torch.int8, ()),
    )
    assert offsets(specs) == [0, 1024, 1024 + 2048, 1024 + 2048 + 1024]


def test_the_source_may_be_overwritten_once_its_bucket_is_full():
    scratch = torch.empty(2, 100)
    source = ((f"t{value}", scratch[value % 2].fill_(value)) for value in range(5))
    for plan in plan_buckets(specs_of([(f"t{n}", scratch[0]) for n in range(5)]), 2 * ALIGNMENT):
        bucket = fill(plan, next_tensors(plan, source), torch.empty(num_bytes(plan), dtype=torch.uint8))
        for name, tensor in unpack(bucket):
            assert torch.equal(tensor, torch.full((100,), float(name[1:])))


@pytest.mark.parametrize(
    ("exported", "message"),
    [
        ([("b", torch.zeros(3))], "announced a .*then exports b"),
        ([("a", torch.zeros(4))], r"exports a torch.float32 \(4,\)"),
        ([("a", torch.zeros(3, dtype=torch.bfloat16))], "exports a torch.bfloat16"),
        ([], "exports nothing more"),
    ],
)
def test_a_tensor_that_was_not_announced_is_refused(exported, message):
    (plan,) = plan_buckets([TensorSpec("a", torch.float32, (3,))], ALIGNMENT)
    with pytest.raises(WeightSyncError, match=message):
        next_tensors(plan, iter(exported))


def test_a_transposed_view_arrives_as_it_reads():
    matrix = torch.arange(12.0).view(3, 4).t()
    (bucket,) = pack([("m", matrix)], ALIGNMENT)
    assert torch.equal(dict(unpack(bucket))["m"], torch.tensor([[0.0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]))


def test_the_bytes_between_tensors_are_zero_in_a_reused_buffer():
    (bucket,) = pack([("a", torch.zeros(3)), ("b", torch.zeros(300))], 4 * ALIGNMENT)
    assert bucket.data.sum() == 0
    assert len(bucket.data) == 3 * ALIGNMENT


def test_a_spec_survives_its_message():
    spec = TensorSpec("layer.0.weight", torch.float8_e5m2, (2, 3))
    assert spec.to_message() == ("layer.0.weight", "float8_e5m2", [2, 3])
    assert TensorSpec.from_message(spec.to_message()) == spec
    assert spec.num_bytes == 6


@pytest.mark.parametrize("name", ["float33", "nn", "empty"])
def test_an_unknown_dtype_is_refused(name):
    with pytest.raises(ValueError, match=name):
        TensorSpec.from_message(("w", name, [1]))


def test_a_bucket_size_below_the_alignment_is_refused():
    with pytest.raises(ValueError, match="bucket_bytes is 100"):
        plan_buckets([], 100)


def test_nothing_gives_no_bucket():
    assert list(pack([], ALIGNMENT)) == []
    assert list(unpack(Bucket((), torch.empty(0, dtype=torch.uint8)))) == []
