"""The DeepSpeed engine that accepts any number of backwards, and the function that builds it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from multiloss._accumulation import AccumulationDivider
from multiloss._checks import check_arguments, check_config, check_loss, check_optimizer, check_path
from multiloss.optimizer import MultiLossOptimizer
from multiloss.zero.parameter_offload import MultiLossZeRoOffload
from multiloss.zero.stage3 import MultiLossZeroOptimizerStage3
from multiloss.zero.stage_1_and_2 import MultiLossZeroOptimizer
from multiloss.zero.window import BackwardWindow


class MultiLossEngine(DeepSpeedEngine):  # type: ignore[misc]  # deepspeed has no type hints
    """A DeepSpeed engine whose weights after each step are those of plain PyTorch with rank-averaged gradients.

    Several backwards before a step add up, in every ZeRO stage, whether they share a forward, retain the graph, or are
    started by :meth:`backward`, by :meth:`scale` or by ``loss.backward()`` on what the engine's forward returned.
    Stages 2 and 3 reduce in every backward, so every rank must reach the same parameters in it; stages 0 and 1 reduce
    in :meth:`step`. Build it with :func:`initialize`.

    Args:
        args: As :class:`deepspeed.DeepSpeedEngine`.
        kwargs: As above.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._forward_depth = 0
        self._accumulation: AccumulationDivider | None = None
        self._scaled_backward = BackwardWindow()
        super().__init__(*args, **kwargs)
        if self.gradient_accumulation_steps() > 1:
            self._accumulation = AccumulationDivider(self.module, self.gradient_accumulation_steps())

    # -- building -----------------------------------------------------------------------------------------------

    def _do_sanity_check(self) -> None:
        super()._do_sanity_check()
        check_config(self)

    def _set_distributed_vars(self, args: Any) -> None:
        if getattr(args, "device_rank", 0) is None:  # Lightning's CPU devices have no index
            args.device_rank = self.local_rank
        super()._set_distributed_vars(args)

    def _do_optimizer_sanity_check(self, basic_optimizer: Optimizer) -> Any:
        # The module's own parameters, before ZeRO exchanges them for flat shards.
        self.parameter_groups: list[list[Parameter]] = [list(group["params"]) for group in basic_optimizer.param_groups]
        check_optimizer(basic_optimizer)
        wrapper = super()._do_optimizer_sanity_check(basic_optimizer)
        if wrapper == deepspeed_engine.BFLOAT16:
            # Stage 1 with bf16 weights and fp32 gradients: our ZeRO optimizer accumulates in fp32 itself.
            return deepspeed_engine.ZERO_OPTIMIZATION
        return wrapper

    @property
    def has_optimizer(self) -> bool:
        """Whether the engine was built with an optimizer."""
        return self.optimizer is not None and not isinstance(
            self.optimizer, (deepspeed_engine.DummyOptim, DeepSpeedZeRoOffload)
        )

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As upstream."""
        self._forward_depth = 0
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        if isinstance(offload, MultiLossZeRoOffload):
            offload.begin_forward()
        return super().forward(*inputs, **kwargs)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        self._forward_depth += 1
        return super()._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        self._forward_depth = max(self._forward_depth - 1, 0)
        if self._forward_depth == 0:  # else the root module has called itself and still runs
            super()._forward_epilogue()

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, create_graph: bool = False
    ) -> Tensor:
        """Back-propagate ``loss`` and add to the gradients of every parameter that it reaches.

        Args:
            loss: A tensor with one element and a graph.
            retain_graph: Keep the graph, so that it can be walked again, by this or by another loss.
            scale_wrt_gas: Divide by the config's ``gradient_accumulation_steps``, as DeepSpeed.
            create_graph: Make the gradients differentiable. The graph is then kept, too.

        Returns:
            ``loss``, divided as ``scale_wrt_gas`` says.

        Raises:
            TypeError: If ``loss`` is not a tensor.
            ValueError: If ``loss`` has more than one element or no graph.
            RuntimeError: If the engine has no optimizer; and PyTorch's own, of which those about a graph that was not
                retained are the common ones. The engine stays usable.
        """
        check_loss(self, loss, "backward")
        if not self.managed_gradient_accumulation():
            self._unmanaged_backward_count += 1
        steps = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        divided = loss / steps if steps > 1 else loss
        scaled = self._scale_loss(divided)
        with self._engine_backward():
            scaled.backward(retain_graph=retain_graph or create_graph, create_graph=create_graph)
        return divided

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Scale ``loss`` for a backward that the caller starts: ``engine.scale(loss).backward(retain_graph=...)``.

        The gradients are divided by the config's ``gradient_accumulation_steps`` when they reach the parameters.

        Args:
            loss: A tensor with one element and a graph.
            retain_graph: Accepted for compatibility and ignored: the backward's own argument decides.

        Returns:
            The scaled loss. It may be walked several times.

        Raises:
            TypeError: If ``loss`` is not a tensor.
            ValueError: If ``loss`` has more than one element or no graph.
            RuntimeError: If the engine has no optimizer.
        """
        check_loss(self, loss, "scale")
        scaled = self._scale_loss(loss)
        if scaled is not loss:
            scaled.register_hook(self._expect_scaled_backward)
        return scaled

    def _scale_loss(self, loss: Tensor) -> Tensor:
        if isinstance(self.optimizer, ZeROOptimizer):
            scaled: Tensor = self.optimizer.scale_if_loss(loss)
            return scaled
        if self.torch_autocast_z0_gradscaler:
            scaled = self.torch_autocast_z0_gradscaler.scale(loss)
            return scaled
        return loss

    def _expect_scaled_backward(self, grad: Tensor) -> Tensor:
        self._scaled_backward.enter()
        return grad

    @contextmanager
    def _engine_backward(self) -> Iterator[None]:
        timers = [*self.engine_timers.backward_timers, *self.engine_timers.backward_inner_timers]
        self._start_timers(timers)
        self._running_engine_backward = True
        try:
            with AccumulationDivider.loss_is_divided():
                yield
        finally:
            self._running_engine_backward = False
            self._stop_timers(timers)

    def _backward_prologue(self) -> None:
        """Nothing hangs on the forward's outputs: ``torch.autograd.grad`` passes through them, too."""

    def _backward_prologue_per_tensor(self, grad: Tensor) -> Tensor:
        return grad

    def _backward_epilogue(self) -> None:
        """Each ZeRO optimizer's window ends its own backward."""

    def _backward_post_hook(self) -> None:
        """Before the first gradient of a backward: raise if its loss should have been scaled."""
        scaled = self._running_engine_backward or self._scaled_backward.is_running
        if not scaled and self.optimizer.needs_scaler():
            raise RuntimeError(
                "This configuration scales losses, and backward() was called on a loss that is not scaled. Use"
                " engine.backward(loss) or engine.scale(loss).backward()."
            )

    def _flush_coalesced_reduction_zero12(self, optimizer: MultiLossZeroOptimizer) -> None:
        optimizer.collect_local_gradients()

    def _flush_coalesced_reduction_zero3(self, optimizer: MultiLossZeroOptimizerStage3) -> None:
        optimizer.collect_local_gradients()

    # -- step ---------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters with everything accumulated since the last step, and start clean. Collective.

        With ``gradient_accumulation_steps`` N > 1 in the config, every N-th call updates, as upstream.

        Args:
            lr_kwargs: For the LR scheduler that the engine steps, if it was given one.

        Raises:
            RuntimeError: Inside a backward, without an optimizer, or if a parameter has a gradient that ZeRO would
                ignore: one that was assigned to ``.grad``, or of a parameter that was frozen when the engine was built.
        """
        if not self.has_optimizer:
            raise RuntimeError(
                "engine.step() needs an optimizer, and the engine has none. Pass optimizer=... to multiloss.initialize,"
                ' or name one under "optimizer" in the DeepSpeed config.'
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "step() was called inside a backward (from a gradient hook or a custom autograd function), when not all"
                " gradients have been computed. Call it after backward() has returned."
            )
        managed = self.managed_gradient_accumulation()
        try:
            if not managed or self.is_gradient_accumulation_boundary():
                self._check_gradients_known()
            if managed and self.is_gradient_accumulation_boundary():
                self._reduce_for_step()
            super().step(lr_kwargs)
        finally:
            self._running_engine_step = False

    def _check_gradients_known(self) -> None:
        """Raise for a gradient that only ``.grad`` holds: ZeRO would step without it."""
        if not isinstance(self.optimizer, ZeROOptimizer):
            return
        self.optimizer.settle()
        for param in (param for group in self.parameter_groups for param in group):
            if param.grad is not None:
                raise RuntimeError(
                    f"step() found a gradient in `{self.param_names[param]}.grad` that ZeRO did not put there and"
                    " would ignore. If you assigned it, use deepspeed.utils.safe_set_full_grad. If the parameter was"
                    " frozen when multiloss.initialize ran, unfreeze it before."
                )

    def _reduce_for_step(self) -> None:
        if self.inside_no_sync_ctxt:
            return  # upstream's step() refuses
        if self.zero_optimization_partition_gradients():
            self.optimizer.finalize_gradient_accumulation_boundary()
        elif self.enable_backward_allreduce:
            self.allreduce_gradients()

    def zero_grad(self) -> None:
        """Discard every gradient of the module since the last step, wherever it lives."""
        super().zero_grad()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Discard every gradient of the optimizer's parameters since the last step, wherever it lives."""
        if isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.zero_grad()
        elif self.has_optimizer:
            for group in self.parameter_groups:
                for param in group:
                    param.grad = None

    # -- checkpoints and the end --------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As upstream.

        Raises:
            ValueError: If ``save_dir`` names nothing, on every rank at once.
        """
        check_path(save_dir, "save_checkpoint")
        return super().save_checkpoint(save_dir, *args, **kwargs)

    def load_checkpoint(self, load_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As upstream.

        Raises:
            ValueError: If ``load_dir`` names nothing, on every rank at once.
        """
        check_path(load_dir, "load_checkpoint")
        return super().load_checkpoint(load_dir, *args, **kwargs)

    def destroy(self) -> None:
        """Remove every hook and release what the engine holds."""
        accumulation: AccumulationDivider | None = getattr(self, "_accumulation", None)
        if accumulation is not None:
            accumulation.remove()
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):  # upstream leaves them on the module
            if (hook := getattr(self, name, None)) is not None:
                hook.remove()
        super().destroy()


def initialize(*args: Any, **kwargs: Any) -> tuple[MultiLossEngine, MultiLossOptimizer | None, Any, Any]:
    """Build a :class:`MultiLossEngine`: a drop-in for :func:`deepspeed.initialize`.

    Args:
        args: As :func:`deepspeed.initialize`.
        kwargs: As :func:`deepspeed.initialize`.

    Returns:
        The engine; a :class:`MultiLossOptimizer`, which is a ``torch.optim.Optimizer``, or ``None`` when the engine has
        no optimizer; the data loader or ``None``; the LR scheduler or ``None``.

    Raises:
        ValueError: If the config asks for something that several backwards cannot be exact with.
        NotImplementedError: If several optimizers are given.
    """
    bound = inspect.signature(deepspeed.initialize).bind(*args, **kwargs)
    check_arguments(bound.arguments)
    with substituted_classes():
        engine, _, dataloader, scheduler = deepspeed.initialize(*bound.args, **bound.kwargs)
    optimizer = MultiLossOptimizer(engine) if engine.has_optimizer else None
    return engine, optimizer, dataloader, scheduler


initialize.__signature__ = inspect.signature(deepspeed.initialize)  # type: ignore[attr-defined]


@contextmanager
def substituted_classes() -> Iterator[None]:
    """Make ``deepspeed.initialize`` build with our classes, which it and the engine look up by name."""
    with ExitStack() as stack:
        stack.enter_context(_substituted(deepspeed, "DeepSpeedEngine", MultiLossEngine))
        stack.enter_context(_substituted(deepspeed_engine, "DeepSpeedZeroOptimizer", MultiLossZeroOptimizer))
        stack.enter_context(_substituted(deepspeed_engine, "DeepSpeedZeRoOffload", MultiLossZeRoOffload))
        stack.enter_context(_substituted(stage3, "DeepSpeedZeroOptimizer_Stage3", MultiLossZeroOptimizerStage3))
        yield


@contextmanager
def _substituted(module: ModuleType, name: str, replacement: type) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
