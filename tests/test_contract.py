"""The weights are those of plain PyTorch: every program, stage, order, way of calling and world size."""

from typing import Any

import pytest

from tests.programs import PROGRAMS
from tests.ranks import Ranks

# fp32 sums in another order: 3 to 6 updates on weights of size 1 differ by a few roundings of 6e-8 (seen: 1.2e-7).
TOLERANCE = 1e-6

ZERO3 = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
STAGES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "reduce_bucket_size": 80},
    "stage 2": {"stage": 2, "reduce_bucket_size": 80},
    "stage 3, threshold 0": {"stage": 3, "reduce_bucket_size": 80, "stage3_param_persistence_threshold": 0, **ZERO3},
    "stage 3": {"stage": 3},
}
WAYS = ("engine.backward", "engine.scale")


def run_program(name: str, zero: dict[str, Any]) -> dict[tuple[str, bool], Any]:
    """On a rank: the program in both orders, each by another way of calling."""
    program = PROGRAMS[name]
    order = range(program.heads)
    config = {"zero_optimization": zero}
    return {
        (way, swapped): program.run_engine(order[::-1] if swapped else order, way, config)
        for way, swapped in zip(WAYS, (False, True), strict=True)
    }


def compare(pool: Ranks, name: str, stage: str) -> float:
    """Run and compare; the largest difference."""
    program = PROGRAMS[name]
    order = range(program.heads)
    largest = 0.0
    results = pool.run(run_program, name, STAGES[stage])
    for swapped in (False, True):
        expected = program.run_plain(order[::-1] if swapped else order, pool.world_size)
        for rank, result in enumerate(results):
            way = WAYS[int(swapped)]
            for parameter, weight in result[way, swapped].items():
                difference = (weight - expected[parameter]).abs().max().item()
                largest = max(largest, difference)
                assert difference <= TOLERANCE, (
                    f"{name}, {stage}, {way}, swapped={swapped}, rank {rank} of {pool.world_size}:"
                    f" {parameter} differs by {difference:.1e}"
                )
    return largest


# Four ranks share two cores, so they run the programs that differ most.
FOR_FOUR_RANKS = (
    "eight_losses",
    "zero_grad_between",
    "unused_momentum",
    "step_each_micro_batch",
    "exception_in_retained_graph",
    "clipping_adamw",
    "tied_weights",
    "two_streams",
)
CASES = [(name, world_size) for name in PROGRAMS for world_size in (1, 2)] + [(name, 4) for name in FOR_FOUR_RANKS]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_weights_are_those_of_plain_pytorch(
    pools: dict[int, Ranks], name: str, stage: str, world_size: int, record_property: Any
) -> None:
    """The program ends with plain PyTorch's weights on every rank, in both orders and by both ways of calling."""
    record_property("largest_difference", compare(pools[world_size], name, stage))
