"""The ``torch.optim.Optimizer`` that users hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

if TYPE_CHECKING:
    from multiloss.engine import MultiLossEngine


class ParameterGroup(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc,metaclass]  # also a dict
    """One entry of ``param_groups``: the module's parameters, and the sharded optimizer's hyper-parameters.

    Everything but ``"params"`` is read from and written to the group that the sharded optimizer steps with.

    Args:
        sharded: Gives that group. It is asked every time, because loading a checkpoint replaces it.
        params: The module's own parameters.
    """

    def __init__(self, sharded: Callable[[], dict[str, Any]], params: list[Parameter]) -> None:
        self._sharded = sharded
        self._params = params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._sharded()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise TypeError("The parameters of a sharded optimizer cannot be exchanged after multiloss.initialize.")
        self._sharded()[key] = value

    def __delitem__(self, key: str) -> None:
        if key == "params":
            raise TypeError("The parameters of a sharded optimizer cannot be removed after multiloss.initialize.")
        del self._sharded()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sharded())

    def __len__(self) -> int:
        return len(self._sharded())

    def __repr__(self) -> str:
        return repr({key: self[key] for key in self})

    def __reduce__(self) -> Any:
        return dict, ({key: self[key] for key in self},)


class MultiLossOptimizer(Optimizer):
    """What :func:`multiloss.initialize` returns and what ``self.optimizers()`` gives in a LightningModule.

    An ordinary optimizer to LR schedulers, monitors and ``toggle_optimizer``: ``param_groups`` hold the module's own
    parameters and share every hyper-parameter with the sharded optimizer both ways. ``state`` is the sharded one.
    ``step`` consumes the gradients, as if ``zero_grad`` followed it. A parameter that got no gradient since the last
    ``zero_grad`` or ``step`` is stepped with a zero gradient, where plain PyTorch would skip it: with momentum or
    weight decay it still moves.

    Args:
        engine: The engine that reduces and steps.
    """

    def __init__(self, engine: MultiLossEngine) -> None:
        groups = engine.parameter_groups
        super().__init__([{"params": params} for params in groups], {})
        # The name of the wrapped class is what LearningRateMonitor and printouts show.
        self.__class__ = type(type(engine.basic_optimizer).__name__, (MultiLossOptimizer,), {})
        self._engine = engine
        self.defaults = engine.basic_optimizer.defaults
        self.param_groups: list[Any] = [
            ParameterGroup(lambda index=index: engine.basic_optimizer.param_groups[index], params)  # type: ignore[misc]
            for index, params in enumerate(groups)
        ]

    @property
    def state(self) -> Any:
        """The sharded optimizer's state, by its own flat parameters."""
        return self._engine.basic_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        pass  # torch.optim.Optimizer.__init__ assigns an empty one

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce what is still local, update the parameters, and discard the gradients. Collective.

        With ``gradient_accumulation_steps`` N in the DeepSpeed config, every N-th call updates, as in DeepSpeed.

        Args:
            closure: Reevaluates the model, calls backward and returns the loss. It runs once, before the update.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: Inside a backward.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._engine.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard every gradient since the last step, also what ZeRO has already reduced and sharded.

        Args:
            set_to_none: Accepted for compatibility; the gradients are zero and ``.grad`` is ``None`` either way.
        """
        self._engine.discard_gradients()

    def state_dict(self) -> dict[str, Any]:
        """The sharded optimizer's state: this rank's part of it."""
        state: dict[str, Any] = self._engine.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`state_dict` gave on the same rank."""
        self._engine.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after ``initialize``: the shards are laid out."""
        if "_engine" in self.__dict__:
            raise RuntimeError("add_param_group is not possible after multiloss.initialize: the shards are laid out.")
        super().add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        # Only what this class lacks: custom attributes of the user's optimizer, and DeepSpeed's (loss_scale, ...).
        engine = self.__dict__.get("_engine")
        if engine is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        inner = engine.optimizer if hasattr(engine.optimizer, name) else engine.basic_optimizer
        return getattr(inner, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("A sharded optimizer cannot be pickled or copied; use engine.save_checkpoint.")


# LR schedulers ask whether they wrapped ``step`` in order to warn when they step first. The one that was made for the
# user's optimizer wrapped that one's ``step``, which the sharded step calls.
MultiLossOptimizer.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
