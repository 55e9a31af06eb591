"""The precision plugin: routes Lightning's backwards, clipping and optimizer steps to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from multiloss import clipping

if TYPE_CHECKING:
    from multiloss.engine import MultiLossEngine


class MultiLossPrecision(DeepSpeedPrecision):
    """Runs ``manual_backward`` and ``opt.step()`` through a :class:`multiloss.MultiLossEngine`.

    Args:
        precision: As :class:`lightning.pytorch.plugins.DeepSpeedPrecision`.
    """

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Steppable | None,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        """Back-propagate, with the arguments of :meth:`torch.Tensor.backward`.

        Args:
            tensor: The loss, one element.
            model: If it overrides ``backward``, that is called with the scaled loss.
            optimizer: Ignored: each parameter's own optimizer accumulates its gradient.
            gradient: As in :meth:`torch.Tensor.backward`.
            retain_graph: As in :meth:`torch.Tensor.backward`.
            create_graph: As in :meth:`torch.Tensor.backward`.
            kwargs: As in :meth:`torch.Tensor.backward`, and whatever the model's own ``backward`` takes.
        """
        engine: MultiLossEngine = model.trainer.model  # type: ignore[assignment]
        if gradient is not None:
            kwargs["gradient"] = gradient
        if is_overridden("backward", model):
            scaled = engine.scale(tensor)
            model.backward(scaled, retain_graph=retain_graph, create_graph=create_graph, **kwargs)
        elif kwargs:
            engine.scale(tensor).backward(retain_graph=retain_graph, create_graph=create_graph, **kwargs)
        else:
            engine.backward(tensor, retain_graph=bool(retain_graph), create_graph=create_graph)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, the hooks and the clipping, then step ``optimizer``.

        Args:
            optimizer: The one that steps.
            model: Whose hooks run.
            closure: Runs ``training_step`` and the backward in automatic optimization; what ``opt.step(closure)`` was
                given in manual optimization.
            kwargs: None are accepted.

        Returns:
            What ``closure`` returned.
        """
        if kwargs:
            raise MisconfigurationException(f"optimizer.step got {sorted(kwargs)}; only a closure is accepted.")
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise MisconfigurationException(
                "`training_step` returned None, which skips the backward on this rank alone while other ranks wait for"
                " it. Return a loss, or use manual optimization and skip on every rank."
            )
        optimizer.step()
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the accumulated gradient on its shards, equal to PyTorch on the whole gradient. Collective.

        Args:
            optimizer: Whose gradient.
            clip_val: The largest norm or absolute value; 0 clips nothing.
            gradient_clip_algorithm: Norm or value.
        """
        if clip_val <= 0:
            return
        engine: MultiLossEngine = optimizer._engine  # type: ignore[attr-defined]
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clipping.clip_value(engine, float(clip_val))
        else:
            clipping.clip_norm(engine, float(clip_val))
