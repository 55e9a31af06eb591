"""The contract under DeepSpeed options that change how gradients are stored and reduced."""

from typing import Any

import pytest

from tests import models
from tests.programs import PROGRAMS, EngineRunner, Order, Program, Runner, momentum, sum_of
from tests.ranks import Ranks
from tests.test_contract import TOLERANCE, WAYS, ZERO3

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SMALL = {"reduce_bucket_size": 80}
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1, optimizer offload": {"stage": 1, **OFFLOAD, **SMALL},
    "stage 2, optimizer offload": {"stage": 2, **OFFLOAD, **SMALL},
    "stage 3, optimizer offload": {"stage": 3, **OFFLOAD, **SMALL, "stage3_param_persistence_threshold": 0},
    "stage 3, parameter offload": {
        "stage": 3,
        **OFFLOAD,
        **SMALL,
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    },
    "stage 2, overlap_comm": {"stage": 2, "overlap_comm": True, **SMALL},
    "stage 3, no overlap_comm": {"stage": 3, "overlap_comm": False, **SMALL},
    "stage 1, no contiguous_gradients": {"stage": 1, "contiguous_gradients": False, **SMALL},
    "stage 2, no contiguous_gradients": {"stage": 2, "contiguous_gradients": False, **SMALL},
    "stage 2, overlap_comm, no contiguous_gradients": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": False,
        **SMALL,
    },
    "stage 3, no contiguous_gradients": {"stage": 3, "contiguous_gradients": False, **SMALL},
    "stage 1, no reduce_scatter": {"stage": 1, "reduce_scatter": False, **SMALL},
    "stage 2, no reduce_scatter": {"stage": 2, "reduce_scatter": False, **SMALL},
    "stage 3, no reduce_scatter": {"stage": 3, "reduce_scatter": False, **SMALL},
    "stage 2, round_robin_gradients": {"stage": 2, "round_robin_gradients": True, **SMALL},
    "stage 1, multi-rank buckets off": {"stage": 1, "use_multi_rank_bucket_allreduce": False, **SMALL},
    "stage 2, multi-rank buckets off": {"stage": 2, "use_multi_rank_bucket_allreduce": False, **SMALL},
    "stage 3, prefetching": {"stage": 3, "stage3_prefetch_bucket_size": 200, "stage3_param_persistence_threshold": 0},
    "stage 3, prefetching, released at once": {
        "stage": 3,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 200,
        "stage3_param_persistence_threshold": 0,
    },
    "stage 3, few live parameters": {"stage": 3, "stage3_max_live_parameters": 100, **ZERO3},
    "stage 3, sub-groups": {"stage": 3, "sub_group_size": 50, **SMALL},
}
NAMES = (
    "three_losses",
    "zero_grad_between",
    "unused_adamw",
    "clipping_adamw",
    "accumulation_of_three",
    "exception_in_retained_graph",
    "exception_without_zero_grad",
    "two_forwards",
    "changing_numbers",
    "parameter_groups",
)


def run_programs(zero: dict[str, Any]) -> list[Any]:
    """On a rank: each program, by alternating ways of calling."""
    config = {"zero_optimization": zero}
    return [
        PROGRAMS[name].run_engine(range(PROGRAMS[name].heads), WAYS[index % 2], config)
        for index, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize("option", OPTIONS)
def test_option(pair: Ranks, option: str) -> None:
    """Every program ends with plain PyTorch's weights."""
    expected = [PROGRAMS[name].run_plain(range(PROGRAMS[name].heads), 2) for name in NAMES]
    for rank, results in enumerate(pair.run(run_programs, OPTIONS[option])):
        for name, weights, want in zip(NAMES, results, expected, strict=True):
            for parameter, weight in weights.items():
                difference = (weight - want[parameter]).abs().max().item()
                assert difference <= TOLERANCE, (
                    f"{option}, {name}, rank {rank}: {parameter} differs by {difference:.1e}"
                )


def scaled(zero: dict[str, Any]) -> list[Any]:
    """A fixed loss scale, which stands in for fp16's; then a backward that forgets it."""
    results: list[Any] = []
    for way in WAYS:
        program = PROGRAMS["clipping"]
        run = EngineRunner(program, program.merged({"zero_optimization": zero}), way)
        run.engine.optimizer.override_loss_scale(8.0)
        program.body(run, range(2))
        results.append(run.weights())
        loss = models.loss_of(run.forward(0)[0][0], 0)
        try:
            loss.backward()
        except RuntimeError as error:
            results.append(str(error))
        run.engine.destroy()
    return results


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_scale(pair: Ranks, stage: int) -> None:
    """Gradients and norms are unscaled, and a backward of an unscaled loss raises."""
    expected = PROGRAMS["clipping"].run_plain(range(2), 2)
    for results in pair.run(scaled, {"stage": stage, "stage3_param_persistence_threshold": 0, **SMALL}):
        for weights, message in zip(results[::2], results[1::2], strict=True):
            assert "engine.scale(loss).backward()" in message
            for parameter, weight in weights.items():
                assert (weight - expected[parameter]).abs().max() <= TOLERANCE


def different_heads(run: Runner, order: Order) -> None:
    """Each rank back-propagates the loss of another head, and in the second step one of them none."""
    for key in range(3):
        for rank in run.ranks:
            if key == 1 and rank == 0:
                continue
            output = run.module(models.batch(key, rank))
            run.backpropagate(sum_of(output, [order[rank]]), retain=False)
        run.step()


DIFFERENT_HEADS = Program(different_heads, optimizer=momentum)


def run_different_heads(zero: dict[str, Any]) -> Any:
    """On a rank."""
    return DIFFERENT_HEADS.run_engine(range(2), "engine.backward", {"zero_optimization": zero})


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_reach_different_parameters(pair: Ranks, stage: int) -> None:
    """Stages 0 and 1 reduce in the step: a rank without a gradient contributes zero."""
    expected = DIFFERENT_HEADS.run_plain(range(2), 2)
    for weights in pair.run(run_different_heads, {"stage": stage, **SMALL}):
        for parameter, weight in weights.items():
            assert (weight - expected[parameter]).abs().max() <= TOLERANCE
