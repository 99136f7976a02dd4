"""Processes of senders and receivers are forked from one that has imported torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.lost_peers import fork_server


@pytest.fixture(scope="module", autouse=True)
def forked_children() -> Iterator[None]:
    with fork_server():
        yield
