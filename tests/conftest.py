"""Fixtures."""

from collections.abc import Iterator
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many programs were compared with plain PyTorch, and how far off they were."""
    differences = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "largest_difference" and report.when == "call"
    ]
    if differences:
        terminalreporter.write_line(
            f"{len(differences)} programs x stages x world sizes, each in two orders, compared with plain PyTorch:"
            f" largest difference of a weight {max(differences):.1e}"
        )
