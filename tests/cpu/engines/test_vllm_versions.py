"""The one file that knows vLLM's versions, against clients and models as 0.26, 0.32 and 0.33 have them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.engines.vllm import compat as vllm_versions


class Client26:
    """Takes new weights; has no label for them."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.told.append(request.init_info)

    async def update_weights(self, request: Any) -> None:
        self.told.append(request.update_info)


class Client32(Client26):
    """Labels its outputs with the version of the weights, which is a text."""

    async def update_weight_version(self, version: str) -> None:
        assert isinstance(version, str)
        self.told.append(version)


@pytest.mark.parametrize(("client", "label"), [(Client26(), []), (Client32(), ["7"])], ids=["0.26", "0.32"])
def test_a_weight_update_is_told_to_each_version_in_its_own_words(client: Any, label: list[str]):
    async def update() -> None:
        await vllm_versions.init_weight_transfer(client, {"info": {"sender": "policy-0"}})
        await vllm_versions.update_weights(client, {"message": {"update": 1}})
        await vllm_versions.set_weight_version(client, 7)

    asyncio.run(update())
    assert client.told == [{"info": {"sender": "policy-0"}}, {"message": {"update": 1}}, *label]


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
