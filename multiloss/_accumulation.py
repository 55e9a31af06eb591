"""Division by the config's ``gradient_accumulation_steps`` when the caller starts the backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class AccumulationDivider:
    """Divides what reaches the parameters in a backward whose loss ``engine.backward`` has not divided.

    Upstream divides where the gradient enters the forward's outputs, which a loss may reach more than once or not at
    all. Here each parameter divides its own gradient, once per backward.

    Args:
        module: Its trainable parameters get a hook.
        steps: The divisor.
    """

    # Backwards of a loss that is already divided, of any engine in the process: such a loss may reach the parameters
    # of several engines.
    _divided_backwards: ClassVar[int] = 0

    def __init__(self, module: Module, steps: int) -> None:
        self._steps = steps
        self._hooks = [
            param.register_hook(functools.partial(self._divide, param))
            for param in module.parameters()
            if param.requires_grad
        ]

    @classmethod
    @contextmanager
    def loss_is_divided(cls) -> Iterator[None]:
        """While the backward of a divided loss runs."""
        AccumulationDivider._divided_backwards += 1
        try:
            yield
        finally:
            AccumulationDivider._divided_backwards -= 1

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _divide(self, param: Parameter, grad: Tensor) -> Tensor:
        if AccumulationDivider._divided_backwards or not _accumulates(param):
            return grad
        return grad / self._steps


def _accumulates(param: Parameter) -> bool:
    """Whether the running graph task accumulates into ``param``, rather than handing its gradient to autograd.grad."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a node that autograd.grad captures
        return False
