"""Fixtures."""

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """Processes for every world size, kept for the whole session."""
    pools = {world_size: Ranks(world_size) for world_size in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def pair(pools: dict[int, Ranks]) -> Ranks:
    """Two ranks."""
    return pools[2]
