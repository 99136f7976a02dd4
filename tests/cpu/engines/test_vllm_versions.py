"""The one file that knows vLLM's versions, against clients and models as 0.26, 0.32 and 0.33 have them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.engines.vllm import compat as vllm_versions
from skyrl_train.engines.vllm.models import CPU_HEAD_SIZES, CPU_LATENT_SIZE


class Client26:
    """Has no label for the version of its weights."""

    def __init__(self) -> None:
        self.labels: list[str] = []


class Client32(Client26):
    """Labels its outputs with the version of the weights, which is a text."""

    async def update_weight_version(self, version: str) -> None:
        assert isinstance(version, str)
        self.labels.append(version)


@pytest.mark.parametrize(("client", "labels"), [(Client26(), []), (Client32(), ["7"])], ids=["0.26", "0.32"])
def test_the_version_is_a_label_where_vllm_has_one(client: Any, labels: list[str]):
    asyncio.run(vllm_versions.set_weight_version(client, 7))
    assert client.labels == labels


def test_spans_of_versions_are_read_from_outputs():
    spans = [SimpleNamespace(version="default", start=0), SimpleNamespace(version="12", start=5)]
    starts = vllm_versions.version_starts
    assert starts(SimpleNamespace(weight_versions=spans)) == [(0, 0), (12, 5)]  # type: ignore[arg-type]
    assert starts(SimpleNamespace(weight_versions=None)) == []  # type: ignore[arg-type]


def test_only_the_refusal_of_0_33_counts_as_one():
    class RetryableRequestError(Exception):
        """As in vLLM 0.33."""

    assert vllm_versions.is_refusal_of_a_pause(RetryableRequestError())
    assert not vllm_versions.is_refusal_of_a_pause(ValueError())


@pytest.mark.parametrize(
    ("mapper", "expected"),
    [
        (None, None),
        (SimpleNamespace(get_unstacked_mapper=lambda: "unstacked"), "unstacked"),
        (SimpleNamespace(get_unstacked_mapper=lambda: "unstacked", get_rename_mapper=lambda: "renames"), "renames"),
    ],
)
def test_the_mapper_of_names_is_found_under_either_name(mapper: Any, expected: str | None):
    assert vllm_versions.rename_mapper(SimpleNamespace(hf_to_vllm_mapper=mapper)) == expected
    assert vllm_versions.rename_mapper(SimpleNamespace()) is None


def test_an_argument_that_vllm_does_not_have_is_named():
    with pytest.raises(ValueError, match="engine_init_kwargs.*no_such_argument"):
        vllm_versions.build_async_llm({"model": "none", "no_such_argument": 1})


def test_sizes_of_heads_without_a_gpu_are_those_that_the_installed_vllm_names():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    assert CPUAttentionBackend.get_supported_head_sizes() == list(CPU_HEAD_SIZES)
    assert CPUMLABackend.get_supported_head_sizes() == [CPU_LATENT_SIZE]
