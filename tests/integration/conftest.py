"""What several of these files begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.rank_processes import Trio


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    trio = Trio()
    try:
        yield trio
    finally:
        trio.close()
