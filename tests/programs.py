"""Training programs, each written once and run by plain PyTorch and by the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

import multiloss
from tests import models

Outputs = list[tuple[Tensor, ...]]  # one entry per rank that the runner plays
Order = Sequence[int]

LEARNING_RATE = 0.1


class Runner:
    """What a program calls. ``ranks`` says whose batches it sees."""

    ranks: Sequence[int]
    model: models.MultiHead
    module: nn.Module  # what is called
    optimizer: torch.optim.Optimizer

    def forward(self, key: int) -> Outputs:
        """The outputs for the batches of ``key``."""
        return [self.module(models.batch(key, rank)) for rank in self.ranks]

    def backward(self, outputs: Outputs, *heads: int, retain: bool = False) -> None:
        """Back-propagate the sum of the losses of ``heads``."""
        for output in outputs:
            self.backpropagate(sum_of(output, heads), retain)

    def backpropagate(self, loss: Tensor, retain: bool) -> None:
        """One backward."""
        raise NotImplementedError

    def failing_backward(self, outputs: Outputs, head: int, retain: bool = False) -> None:
        """A backward that raises half-way."""
        self.model.fuse.armed = True
        for output in outputs:
            try:
                self.backpropagate(sum_of(output, [head]), retain)
            except ArithmeticError:
                continue
            raise AssertionError("the fuse did not blow")
        self.model.fuse.armed = False

    def refused_backward(self, outputs: Outputs, head: int) -> None:
        """A backward of a graph that is gone."""
        for output in outputs:
            try:
                self.backpropagate(sum_of(output, [head]), False)
            except RuntimeError as error:
                if "retain_graph=True" not in str(error):
                    raise
                continue
            raise AssertionError("PyTorch did not refuse")

    def zero_grad(self) -> None:
        """Through the optimizer."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Update, and discard the gradients."""
        raise NotImplementedError


def sum_of(output: tuple[Tensor, ...], heads: Sequence[int]) -> Tensor:
    """The sum of these heads' losses."""
    return torch.stack([models.loss_of(output[head], head) for head in heads]).sum()


class PlainRunner(Runner):
    """The oracle: one process that plays all ranks and averages their gradients."""

    def __init__(self, program: Program, world_size: int) -> None:
        self.ranks = range(world_size)
        self.model = models.build(program.model, program.heads)
        self.module = self.model
        self.optimizer = program.optimizer(self.model)
        self.program = program
        self.calls = 0

    def backpropagate(self, loss: Tensor, retain: bool) -> None:
        """Averaged over ranks and, as DeepSpeed does, over micro-batches."""
        (loss / (len(self.ranks) * self.program.accumulation)).backward(retain_graph=retain)

    def step(self) -> None:
        """Every ``accumulation``-th call updates, as DeepSpeed's."""
        self.calls += 1
        if self.calls % self.program.accumulation:
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)  # the documented deviation of flat shards
        if self.program.clipping:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.program.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()


class EngineRunner(Runner):
    """One rank of a MultiLossEngine."""

    def __init__(self, program: Program, config: dict[str, Any], way: str) -> None:
        self.ranks = [torch.distributed.get_rank()]
        self.model = models.build(program.model, program.heads)
        self.engine, optimizer, _, _ = multiloss.initialize(
            model=self.model, optimizer=program.optimizer(self.model), config=config
        )
        assert optimizer is not None
        self.module, self.optimizer, self.way = self.engine, optimizer, way

    def backpropagate(self, loss: Tensor, retain: bool) -> None:
        """By the way of calling that is being tested."""
        if self.way == "engine.backward":
            self.engine.backward(loss, retain_graph=retain)
        elif self.way == "engine.scale":
            self.engine.scale(loss, retain_graph=retain).backward(retain_graph=retain)
        else:
            loss.backward(retain_graph=retain)

    def step(self) -> None:
        """Through the optimizer."""
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Every parameter in full."""
        params = dict(self.model.named_parameters())
        gathered = (
            deepspeed.zero.GatheredParameters(list(params.values()))
            if self.engine.zero_optimization_partition_weights()
            else contextlib.nullcontext()
        )
        with gathered:
            return {name: param.detach().float().clone() for name, param in params.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain gradient descent shows every gradient as it is."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """State that a stale or missing gradient would spoil."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The usual choice."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups."""
    heads = [param for name, param in model.named_parameters() if name.startswith("heads")]
    rest = [param for name, param in model.named_parameters() if not name.startswith("heads")]
    param_groups: list[dict[str, Any]] = [{"params": rest}, {"params": heads, "lr": 0.03}]
    return torch.optim.SGD(param_groups, lr=LEARNING_RATE, momentum=0.5)


@dataclass(frozen=True)
class Program:
    """A training program and what it runs on."""

    body: Callable[[Runner, Order], None]
    model: type[models.MultiHead] = models.MultiHead
    heads: int = 2
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    clipping: float = 0.0
    accumulation: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    def run_plain(self, order: Order, world_size: int) -> dict[str, Tensor]:
        """The weights that plain PyTorch ends with."""
        runner = PlainRunner(self, world_size)
        self.body(runner, order)
        return {name: param.detach() for name, param in runner.model.named_parameters()}

    def run_engine(self, order: Order, way: str, config: dict[str, Any]) -> dict[str, Tensor]:
        """The weights that the engine ends with. Collective."""
        runner = EngineRunner(self, self.merged(config), way)
        try:
            self.body(runner, order)
            return runner.weights()
        finally:
            runner.engine.destroy()

    def merged(self, config: dict[str, Any]) -> dict[str, Any]:
        """The DeepSpeed config of this program."""
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **self.config,
            **config,
        }


def one_loss(run: Runner, order: Order) -> None:
    """What every system gets right."""
    for key in range(3):
        outputs = run.forward(key)
        run.zero_grad()
        run.backward(outputs, order[0])
        run.step()


def each_loss(run: Runner, order: Order) -> None:
    """Every loss by its own backward through one forward."""
    for key in range(3):
        outputs = run.forward(key)
        run.zero_grad()
        for head in order[:-1]:
            run.backward(outputs, head, retain=True)
        run.backward(outputs, order[-1])
        run.step()


def last_retains(run: Runner, order: Order) -> None:
    """The last backward retains, too, and ``step`` alone discards."""
    kept = []
    for key in range(3):
        outputs = run.forward(key)
        for head in order:
            run.backward(outputs, head, retain=True)
        run.step()
        kept.append(outputs)


def same_loss_twice(run: Runner, order: Order) -> None:
    """Its gradient counts twice."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, order[0], retain=True)
        run.backward(outputs, order[0], retain=True)
        run.backward(outputs, order[1])
        run.step()


def summed(run: Runner, order: Order) -> None:
    """The sum at once, then one of them again."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, *order, retain=True)
        run.backward(outputs, order[0])
        run.step()


def zero_grad_between(run: Runner, order: Order) -> None:
    """Only what follows ``zero_grad`` counts, reduced or not."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, order[0], retain=True)
        run.zero_grad()
        run.backward(outputs, order[1])
        run.step()


def zero_grad_last(run: Runner, order: Order) -> None:
    """A step after ``zero_grad`` sees nothing."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, order[0], retain=True)
        run.backward(outputs, order[1])
        if key == 1:
            run.zero_grad()
        run.step()


def two_forwards(run: Runner, order: Order) -> None:
    """Two forwards before the backwards, walked in turn."""
    for key in range(3):
        first, second = run.forward(2 * key), run.forward(2 * key + 1)
        run.zero_grad()
        run.backward(first, order[0], retain=True)
        run.backward(second, order[1], retain=True)
        run.backward(first, order[1])
        run.backward(second, order[0])
        run.step()


def forward_between(run: Runner, order: Order) -> None:
    """A forward between two walks of an earlier graph."""
    for key in range(3):
        first = run.forward(2 * key)
        run.backward(first, order[0], retain=True)
        second = run.forward(2 * key + 1)
        run.backward(second, order[1])
        run.backward(first, order[1])
        run.step()


def evaluation_between(run: Runner, order: Order) -> None:
    """A forward without gradients between two walks."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, order[0], retain=True)
        run.module.eval()
        with torch.no_grad():
            run.forward(key + 100)
        run.module.train()
        run.backward(outputs, order[1])
        run.step()


def unused_in_some_steps(run: Runner, order: Order) -> None:
    """A head that a step does not use has no gradient in it, not the last one."""
    for key, heads in enumerate([order, order[:1], order[1:], [], order[:1]]):
        outputs = run.forward(key)
        run.zero_grad()
        for head in heads:
            run.backward(outputs, head, retain=True)
        run.step()


def changing_numbers(run: Runner, order: Order) -> None:
    """A different number of losses, in another order, in each step."""
    for key in range(5):
        outputs = run.forward(key)
        for head in [*order[key % len(order) :], *order[: key % 2]]:
            run.backward(outputs, head, retain=True)
        run.step()


def micro_batches(run: Runner, order: Order) -> None:
    """Several forwards accumulate before one step."""
    for key in range(2):
        run.zero_grad()
        for micro in range(3):
            outputs = run.forward(3 * key + micro)
            run.backward(outputs, order[0], retain=True)
            run.backward(outputs, order[1])
        run.step()


def step_each_micro_batch(run: Runner, order: Order) -> None:
    """DeepSpeed's own accumulation: ``step`` after each micro-batch."""
    for key in range(6):
        outputs = run.forward(key)
        run.backward(outputs, order[0], retain=True)
        run.backward(outputs, order[1])
        run.step()


def exception_then_zero_grad(run: Runner, order: Order) -> None:
    """A backward that raised leaves nothing behind."""
    for key in range(3):
        outputs = run.forward(key)
        if key == 1:
            run.failing_backward(outputs, order[0])
            run.zero_grad()
            outputs = run.forward(key + 100)
        run.backward(outputs, order[0], retain=True)
        run.backward(outputs, order[1])
        run.step()


def exception_in_retained_graph(run: Runner, order: Order) -> None:
    """A walk that raised half-way can be walked again."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, order[1], retain=True)
        run.failing_backward(outputs, order[0], retain=True)
        run.zero_grad()
        run.backward(outputs, order[0], retain=True)
        run.backward(outputs, order[1])
        run.step()


def exception_without_zero_grad(run: Runner, order: Order) -> None:
    """What a failed backward had computed counts, as in PyTorch."""
    for key in range(3):
        outputs = run.forward(key)
        run.failing_backward(outputs, order[0], retain=True)
        if key == 1:
            run.backward(outputs, order[1])
        run.step()


def freed_graph(run: Runner, order: Order) -> None:
    """PyTorch's error for a graph that was not retained reaches the user, and training goes on."""
    for key in range(3):
        outputs = run.forward(key)
        run.backward(outputs, order[0])
        run.refused_backward(outputs, order[0])
        run.zero_grad()
        outputs = run.forward(key)
        run.backward(outputs, order[1])
        run.step()


def gradient_penalty(run: Runner, order: Order) -> None:
    """A loss of the gradient with respect to the inputs, walked twice, beside the ordinary losses."""
    for key in range(3):
        for rank in run.ranks:
            inputs = models.batch(key, rank).requires_grad_()
            output = run.module(inputs)
            (gradient,) = torch.autograd.grad(output[order[0]].sum(), inputs, create_graph=True)
            penalty = (gradient.norm(dim=1) - 1).square().mean()
            other = run.module(models.batch(key + 100, rank))
            run.backpropagate(penalty, retain=True)
            run.backpropagate(sum_of(other, order[1:]), retain=False)
            run.backpropagate(penalty, retain=True)
            run.backpropagate(sum_of(output, order), retain=False)
        run.step()


PROGRAMS: dict[str, Program] = {
    "one_loss": Program(one_loss),
    "two_losses": Program(each_loss),
    "three_losses": Program(each_loss, heads=3),
    "eight_losses": Program(each_loss, heads=8),
    "last_retains": Program(last_retains),
    "same_loss_twice": Program(same_loss_twice),
    "summed": Program(summed, heads=3),
    "zero_grad_between": Program(zero_grad_between),
    "zero_grad_last": Program(zero_grad_last),
    "two_forwards": Program(two_forwards),
    "forward_between": Program(forward_between),
    "evaluation_between": Program(evaluation_between),
    "unused_in_some_steps": Program(unused_in_some_steps),
    "unused_momentum": Program(unused_in_some_steps, optimizer=momentum),
    "unused_adamw": Program(unused_in_some_steps, optimizer=adamw),
    "changing_numbers": Program(changing_numbers, heads=3),
    "micro_batches": Program(micro_batches),
    "step_each_micro_batch": Program(step_each_micro_batch, accumulation=2),
    "accumulation_of_three": Program(step_each_micro_batch, accumulation=3, optimizer=adamw),
    "exception_then_zero_grad": Program(exception_then_zero_grad),
    "exception_in_retained_graph": Program(exception_in_retained_graph),
    "exception_without_zero_grad": Program(exception_without_zero_grad),
    "freed_graph": Program(freed_graph),
    "gradient_penalty": Program(gradient_penalty),
    "clipping": Program(each_loss, clipping=0.05),
    "clipping_adamw": Program(zero_grad_between, clipping=0.05, optimizer=adamw),
    "adamw": Program(each_loss, optimizer=adamw),
    "momentum": Program(each_loss, optimizer=momentum),
    "parameter_groups": Program(each_loss, optimizer=groups),
    "tied_weights": Program(each_loss, model=models.Tied),
    "repeated_submodule": Program(each_loss, model=models.Repeated),
    "repeated_two_forwards": Program(two_forwards, model=models.Repeated),
    "checkpointed": Program(each_loss, model=models.Checkpointed),
    "checkpointed_two_forwards": Program(two_forwards, model=models.Checkpointed),
    "frozen_blocks": Program(each_loss, model=models.Frozen),
    "two_streams": Program(each_loss, model=models.Deep, heads=3),
    "two_streams_exception": Program(exception_in_retained_graph, model=models.Deep),
}
