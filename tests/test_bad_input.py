"""What cannot work raises on every rank, says what to do, and leaves the engine usable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

import multiloss
from multiloss import DeepSpeedMultiLossStrategy
from tests import models
from tests.programs import PROGRAMS, EngineRunner, PlainRunner, Program, each_loss
from tests.ranks import Ranks
from tests.test_contract import STAGES, TOLERANCE

PROGRAM = PROGRAMS["two_losses"]
Call = Callable[[EngineRunner], Any]


def message_of(call: Callable[[], Any]) -> str:
    """The type and the message of what ``call`` raises; empty if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def no_graph(run: EngineRunner) -> None:
    """A loss without a graph."""
    run.engine.backward(run.forward(0)[0][0].detach().mean())


def no_graph_scaled(run: EngineRunner) -> None:
    """The same, by the other way of calling."""
    run.engine.scale(run.forward(0)[0][0].detach().mean())


def not_scalar(run: EngineRunner) -> None:
    """A loss with several elements."""
    run.engine.backward(run.forward(0)[0][0])


def not_a_tensor(run: EngineRunner) -> None:
    """A number."""
    run.engine.backward(1.0)  # type: ignore[arg-type]


def step_in_backward(run: EngineRunner) -> None:
    """A step from a gradient hook."""
    loss = models.loss_of(run.forward(0)[0][0], 0)
    loss.register_hook(lambda grad: run.optimizer.step())
    run.engine.backward(loss)


def save_nowhere(run: EngineRunner) -> None:
    """A checkpoint without a path."""
    run.engine.save_checkpoint(None)  # type: ignore[arg-type]


def save_empty(run: EngineRunner) -> None:
    """A checkpoint with an empty path."""
    run.engine.save_checkpoint("")


def load_nowhere(run: EngineRunner) -> None:
    """Loading without a path."""
    run.engine.load_checkpoint(None)  # type: ignore[arg-type]


def add_group(run: EngineRunner) -> None:
    """A parameter group added after the shards were laid out."""
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def assigned_gradient(run: EngineRunner) -> None:
    """A gradient that ZeRO does not know of."""
    run.forward(0)
    gain = run.model.gain
    gain.grad = torch.ones_like(gain)
    try:
        if isinstance(run.engine.optimizer, torch.optim.Optimizer):
            raise RuntimeError("step() found a gradient")  # stage 0 has no shards: .grad is the gradient
        run.engine.step()
    finally:
        run.zero_grad()


CALLS: dict[Call, str] = {
    no_graph: "ValueError: engine.backward(loss) needs a loss with a graph",
    no_graph_scaled: "ValueError: engine.scale(loss) needs a loss with a graph",
    not_scalar: "got shape (4, 3)",
    not_a_tensor: "TypeError: engine.backward(loss) needs a tensor with one element, got float",
    step_in_backward: "RuntimeError: step() was called inside a backward",
    save_nowhere: "ValueError: engine.save_checkpoint needs the path of a checkpoint directory, got None",
    save_empty: "ValueError: engine.save_checkpoint needs the path of a checkpoint directory, got ''",
    load_nowhere: "ValueError: engine.load_checkpoint needs the path of a checkpoint directory, got None",
    assigned_gradient: "RuntimeError: step() found a gradient",
    add_group: "RuntimeError: add_param_group is not possible",
}


def refused_then_trained(zero: dict[str, Any]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Every bad call, then an ordinary program on the same engine."""
    run = EngineRunner(PROGRAM, PROGRAM.merged({"zero_optimization": zero}), "engine.backward")
    try:
        messages = {call.__name__: message_of(lambda call=call: call(run)) for call in CALLS}  # type: ignore[misc]
        run.zero_grad()
        PROGRAM.body(run, range(2))
        return messages, run.weights()
    finally:
        run.engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_bad_calls_raise_on_every_rank_and_leave_the_engine_usable(pair: Ranks, stage: str) -> None:
    """Each bad call has its message, and training afterwards gives plain PyTorch's weights."""
    expected = PROGRAM.run_plain(range(2), 2)
    for messages, weights in pair.run(refused_then_trained, STAGES[stage]):
        for call, fragment in CALLS.items():
            assert fragment in messages[call.__name__], (call.__name__, messages[call.__name__])
        for name, weight in weights.items():
            assert (weight - expected[name]).abs().max() <= TOLERANCE, name


def refused_configs() -> dict[str, str]:
    """What ``initialize`` says to each config."""
    messages = {}
    for name, config in CONFIGS.items():
        model = models.build(models.MultiHead, 2)
        merged = PROGRAM.merged(config)
        messages[name] = message_of(
            lambda model=model, merged=merged: multiloss.initialize(  # type: ignore[misc]
                model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=merged
            )
        )
    return messages


CONFIGS: dict[str, dict[str, Any]] = {
    "overlap_comm in stage 0": {"zero_optimization": {"stage": 0, "overlap_comm": True}},
    "overlap_comm in stage 1": {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    "stage 4": {"zero_optimization": {"stage": 4}},
    "DeepCompile": {"zero_optimization": {"stage": 2}, "compile": {"deepcompile": True}},
    "ZenFlow": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {"topk_ratio": 0.1, "select_strategy": "auto", "update_interval": 4},
        }
    },
    "hybrid engine": {"zero_optimization": {"stage": 2}, "hybrid_engine": {"enabled": True}},
}
FRAGMENTS = {
    "overlap_comm in stage 0": "overlap_comm=True is not possible with ZeRO stage 0",
    "overlap_comm in stage 1": "overlap_comm=True is not possible with ZeRO stage 1",
    "stage 4": "Input should be 0, 1, 2",
    "DeepCompile": "multiloss does not support DeepCompile",
    "ZenFlow": "multiloss does not support ZenFlow",
    "hybrid engine": "does not support DeepSpeed's hybrid engine",
}


def test_configs_that_cannot_work_are_refused(pair: Ranks) -> None:
    """Before anything is built, on every rank."""
    for messages in pair.run(refused_configs):
        for name, fragment in FRAGMENTS.items():
            assert fragment in messages[name], (name, messages[name])


def without_optimizer(stage: int) -> list[str]:
    """What an engine without an optimizer says."""
    model = models.build(models.MultiHead, 2)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    engine, optimizer, _, _ = multiloss.initialize(model=model, config=config)
    assert optimizer is None
    try:
        loss = models.loss_of(engine(models.batch(0, 0))[0], 0)
        return [message_of(call) for call in (lambda: engine.backward(loss), lambda: engine.scale(loss), engine.step)]
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_training_without_an_optimizer(pair: Ranks, stage: int) -> None:
    """The message says how to pass one."""
    for messages in pair.run(without_optimizer, stage):
        for message in messages:
            assert "Pass optimizer=..." in message, message


def pipeline() -> str:
    """A pipeline module."""
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=nn.MSELoss())
    return message_of(lambda: multiloss.initialize(model=module, config={"train_batch_size": 2}))


def test_pipeline_modules_are_refused(pair: Ranks) -> None:
    """Their engine runs forward and backward itself."""
    assert all("PipelineModule" in message for message in pair.run(pipeline))


def several_optimizers() -> str:
    """A list of optimizers."""
    model = models.build(models.MultiHead, 2)
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in model.heads]
    return message_of(lambda: multiloss.initialize(model=model, optimizer=optimizers, config=PROGRAM.merged({})))


def test_several_optimizers_are_refused(pair: Ranks) -> None:
    """Not silently the first one."""
    assert all("got 2 optimizers in a list" in message for message in pair.run(several_optimizers))


def test_strategy_arguments() -> None:
    """Unknown arguments, stages and options are refused when the strategy is made."""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'stge'.*Its arguments are: .*stage"):
        DeepSpeedMultiLossStrategy(stge=2)
    for stage in (4, -1, "two"):
        with pytest.raises(ValueError, match="must be one of"):
            DeepSpeedMultiLossStrategy(stage=stage)
    with pytest.raises(ValueError, match="must be one of"):
        DeepSpeedMultiLossStrategy(config={"zero_optimization": {"stage": 7}})
    with pytest.raises(ValueError, match="by `config`, and offload_optimizer, stage, which the config would override"):
        DeepSpeedMultiLossStrategy(stage=3, offload_optimizer=True, config={"zero_optimization": {"stage": 2}})
    for stage in (0, 1):
        with pytest.raises(ValueError, match="overlap_comm=True is not possible"):
            DeepSpeedMultiLossStrategy(stage=stage, overlap_comm=True)
    with pytest.raises(ValueError, match="overlap_comm=True is not possible"):
        DeepSpeedMultiLossStrategy(config={"zero_optimization": {"stage": 1, "overlap_comm": True}})


def died_on_one_rank(zero: dict[str, Any]) -> dict[str, Tensor]:
    """One rank's backward raises before it has computed any gradient; both discard and go on."""
    run = EngineRunner(PROGRAM, PROGRAM.merged({"zero_optimization": zero}), "engine.backward")
    try:
        outputs = run.forward(7)
        if run.ranks[0] == 1:
            loss = models.loss_of(outputs[0][0], 0)
            loss.register_hook(_raise)
            assert "one rank only" in message_of(lambda: run.engine.backward(loss))
        run.zero_grad()
        PROGRAM.body(run, range(2))
        return run.weights()
    finally:
        run.engine.destroy()


def _raise(grad: Tensor) -> None:
    raise ArithmeticError("one rank only")


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_on_one_rank_before_any_reduction(pair: Ranks, stage: str) -> None:
    """Nothing is out of step afterwards."""
    expected = PlainRunner(Program(each_loss), 2)
    each_loss(expected, range(2))
    for weights in pair.run(died_on_one_rank, STAGES[stage]):
        for name, param in expected.model.named_parameters():
            assert (weights[name] - param).abs().max() <= TOLERANCE, name


def unfrozen_later(zero: dict[str, Any]) -> str:
    """A parameter that was frozen when the engine was built."""
    model = models.build(models.MultiHead, 2)
    model.heads[1].requires_grad_(False)
    engine, optimizer, _, _ = multiloss.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=PROGRAM.merged({"zero_optimization": zero}),
    )
    assert optimizer is not None
    try:
        model.heads[1].requires_grad_(True)
        outputs = engine(models.batch(0, 0))
        engine.backward(models.loss_of(outputs[1], 1))
        return message_of(optimizer.step)
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "stage 0"])
def test_a_parameter_unfrozen_later_does_not_stay_still_in_silence(pair: Ranks, stage: str) -> None:
    """The step says which it is."""
    for message in pair.run(unfrozen_later, STAGES[stage]):
        assert "`heads.1.weight.grad`" in message, message
        assert "unfreeze it before" in message, message
