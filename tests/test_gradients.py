"""Gradients as users read them between backwards, and what a backward leaves behind."""

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import Tensor

from tests.benchmarks.zero3_lifetime import count
from tests.programs import PROGRAMS, EngineRunner, PlainRunner, Program, each_loss
from tests.ranks import Ranks
from tests.test_contract import STAGES, TOLERANCE, WAYS

SHARDED = {name: zero for name, zero in STAGES.items() if zero["stage"] > 0}
PROGRAM = Program(each_loss)


def engine_runner(zero: dict[str, Any], way: str = "engine.backward", **config: Any) -> EngineRunner:
    """A runner whose engine the caller destroys."""
    return EngineRunner(PROGRAM, PROGRAM.merged({"zero_optimization": zero, **config}), way)


def full_gradients(run: EngineRunner) -> dict[str, Tensor]:
    """What ``safe_get_full_grad`` gives. Collective."""
    return {name: safe_get_full_grad(param).clone() for name, param in run.model.named_parameters()}


def plain_gradients(run: PlainRunner) -> dict[str, Tensor]:
    """``.grad``, zero where there is none."""
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
        for name, param in run.model.named_parameters()
    }


def assert_same(pool_results: list[list[dict[str, Tensor]]], expected: list[dict[str, Tensor]]) -> None:
    """Every rank's list of gradients equals the expected one."""
    for rank, result in enumerate(pool_results):
        for index, (got, want) in enumerate(zip(result, expected, strict=True)):
            for name in want:
                difference = (got[name] - want[name]).abs().max().item()
                assert difference <= TOLERANCE, f"rank {rank}, gradient {index}, {name}: {difference:.1e}"


def script(run: Any, gradients: Any) -> list[dict[str, Tensor]]:
    """Losses with and without ``zero_grad`` between, then a fresh step; the gradients after each backward."""
    seen = []
    outputs = run.forward(0)
    run.backward(outputs, 0, retain=True)
    seen.append(gradients(run))
    run.zero_grad()
    run.backward(outputs, 1, retain=True)  # alone
    seen.append(gradients(run))
    run.backward(outputs, 0)  # together
    seen.append(gradients(run))
    run.step()
    outputs = run.forward(1)
    run.backward(outputs, 1)  # not contaminated by the retained pair
    seen.append(gradients(run))
    run.zero_grad()
    seen.append(gradients(run))
    return seen


def on_rank(zero: dict[str, Any], way: str) -> list[dict[str, Tensor]]:
    """The script on an engine."""
    run = engine_runner(zero, way)
    try:
        return script(run, full_gradients)
    finally:
        run.engine.destroy()


@pytest.mark.parametrize("way", [*WAYS, "loss.backward"])
@pytest.mark.parametrize("stage", SHARDED)
def test_full_gradients_are_those_of_plain_pytorch(pair: Ranks, stage: str, way: str) -> None:
    """Two losses with ``zero_grad`` between, two that add up, and a fresh step: each gradient is PyTorch's."""
    expected = script(PlainRunner(PROGRAM, 2), plain_gradients)
    assert_same(pair.run(on_rank, SHARDED[stage], way), expected)


def leftovers(zero: dict[str, Any], way: str) -> list[str]:
    """What a retained backward and its follow-up leave on a rank that should not be there."""
    run = engine_runner(zero, way)
    optimizer = run.engine.optimizer
    try:
        found = []
        outputs = run.forward(0)
        run.backward(outputs, 0, retain=True)
        run.backward(outputs, 1)
        if optimizer._window.is_open or optimizer._in_bucket:
            found.append("an open window")
        if any(bucket.params for bucket in optimizer.ipg_buckets.values()):
            found.append("a gradient in a bucket")
        param: Any
        for name, param in run.model.named_parameters():
            if param.grad is not None:
                found.append(f"{name}.grad")
            if zero["stage"] == 3:
                if param.ds_status != ZeroParamStatus.NOT_AVAILABLE and not param.ds_persist:
                    found.append(f"{name} {param.ds_status}")
                if param.ds_active_sub_modules:
                    found.append(f"{name} used by {param.ds_active_sub_modules}")
        if zero["stage"] == 3 and run.model.ds_inflight_param_registry:
            found.append("a gather in flight")
        return found
    finally:
        run.engine.destroy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", SHARDED)
def test_nothing_is_left_after_the_last_backward(pair: Ranks, stage: str, way: str) -> None:
    """After the backward that follows a retained one, no parameter is gathered or in flight and no gradient waits."""
    assert pair.run(leftovers, SHARDED[stage], way) == [[], []]


def written(zero: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Write a gradient, accumulate another on top, and step."""
    run = engine_runner(zero)
    try:
        outputs = run.forward(0)
        run.backward(outputs, 0, retain=True)
        for param in run.model.parameters():
            shape = torch.Size(getattr(param, "ds_shape", param.shape))
            if shape.numel() % 2 == 0:  # upstream's function cannot write what does not divide among the ranks
                safe_set_full_grad(param, torch.ones(shape))
        run.backward(outputs, 1)
        run.step()
        return [run.weights()]
    finally:
        run.engine.destroy()


@pytest.mark.parametrize("stage", [name for name in SHARDED if "threshold" not in name])
def test_a_written_gradient_counts(pair: Ranks, stage: str) -> None:
    """``safe_set_full_grad`` between two backwards replaces the first and the second adds to it."""
    run = PlainRunner(PROGRAM, 2)
    outputs = run.forward(0)
    run.backward(outputs, 0, retain=True)
    for param in run.model.parameters():
        if param.numel() % 2 == 0:
            param.grad = torch.ones_like(param)
    run.backward(outputs, 1)
    run.step()
    weights = {name: param.detach() for name, param in run.model.named_parameters()}
    assert_same(pair.run(written, SHARDED[stage]), [weights])


def clipped_after_reading(zero: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Reading a full gradient in the middle changes nothing."""
    run = engine_runner(zero, gradient_clipping=0.05)
    try:
        for key in range(2):
            outputs = run.forward(key)
            run.backward(outputs, 0, retain=True)
            full_gradients(run)
            run.backward(outputs, 1)
            full_gradients(run)
            run.step()
        return [run.weights()]
    finally:
        run.engine.destroy()


@pytest.mark.parametrize("stage", SHARDED)
def test_reading_gradients_changes_nothing(pair: Ranks, stage: str) -> None:
    """Stage 1 reduces early when a gradient is read; the step is the same."""
    program = Program(each_loss, clipping=0.05)
    run = PlainRunner(program, 2)
    for key in range(2):
        outputs = run.forward(key)
        run.backward(outputs, 0, retain=True)
        run.backward(outputs, 1)
        run.step()
    weights = {name: param.detach() for name, param in run.model.named_parameters()}
    assert_same(pair.run(clipped_after_reading, SHARDED[stage]), [weights])


def test_peak_does_not_grow_with_the_number_of_losses(pair: Ranks) -> None:
    """ZeRO-3 gathers module by module in every walk: K losses hold no more parameters at a time than one does."""
    peaks = {heads: pair.run(count, "multiloss, separate", heads)[0][0].peak for heads in (1, 2, 4)}
    stock = pair.run(count, "stock, summed", 1)[0][0].peak
    assert set(peaks.values()) == {stock}


def mixed_ways(zero: dict[str, Any]) -> dict[str, Tensor]:
    """Each loss by another way of calling."""
    run = EngineRunner(PROGRAMS["three_losses"], PROGRAMS["three_losses"].merged({"zero_optimization": zero}), "")
    try:
        for key in range(3):
            outputs = run.forward(key)
            for head, way in enumerate([*WAYS, "loss.backward"]):
                run.way = way
                run.backward(outputs, head, retain=head < 2)
            run.step()
        return run.weights()
    finally:
        run.engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_ways_of_calling_mix(pair: Ranks, stage: str) -> None:
    """``engine.backward``, ``engine.scale(loss).backward`` and ``loss.backward`` in one step add up."""
    expected = PROGRAMS["three_losses"].run_plain(range(3), 2)
    assert_same([[result] for result in pair.run(mixed_ways, STAGES[stage])], [expected])
