"""What the ZeRO optimizers of all stages share in accounting for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from multiloss.zero.window import BackwardWindow, WindowedHookState


class GradientAccounting:
    """Mixin for a ZeRO optimizer: its backwards are :class:`BackwardWindow` s, and the caller owns the boundary.

    It comes before the upstream class, whose gradient hooks, epilogue and boundary it redirects.
    """

    optimizer: Any  # the user's; set upstream
    zero_grad: Callable[..., None]  # of the class that mixes this in
    _finalizing = False

    def _follow_autograd(self) -> None:
        """Replace the counting of gradient hooks by a window. Call when upstream's constructor has returned."""
        self._window = BackwardWindow(
            on_open=self._open_backward, on_close=self._close_backward, on_abandoned=self._collect_leftovers
        )
        self._backward_hook_state = WindowedHookState(self._window)

    def _open_backward(self) -> None:
        """Prepare for the first gradient of a backward."""

    def _close_backward(self) -> None:
        """Reduce what is left in the buckets."""
        raise NotImplementedError

    def _take_leftovers(self) -> None:
        """Put every ``.grad`` that no hook has taken into the buckets."""
        raise NotImplementedError

    def settle(self) -> None:
        """Deal with a backward that died: its gradients count as far as it came, as in PyTorch."""
        self._window.settle()

    def collect_local_gradients(self) -> None:
        """Take every ``.grad`` that was left on a parameter, as one backward. Communicates in stages 2 and 3."""
        self._window.settle()
        self._collect_leftovers()

    def _collect_leftovers(self) -> None:
        try:
            self._take_leftovers()
            self._close_backward()
        except BaseException:
            self.zero_grad()
            raise

    def is_gradient_accumulation_boundary(self) -> bool:
        """True only while the accumulated gradients are made ready for a step: no backward knows if it is the last."""
        return self._finalizing

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Ignored; see :meth:`is_gradient_accumulation_boundary`."""

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        self._finalizing = True
        try:
            yield
        finally:
            self._finalizing = False

    def initialize_optimizer_states(self) -> None:
        """As upstream, but keep the user's Adagrad, which upstream replaces by one with a single set of options."""
        optimizer = self.optimizer
        super().initialize_optimizer_states()  # type: ignore[misc]  # of the upstream class
        if self.optimizer is not optimizer:
            optimizer.state.clear()
            optimizer.state.update(self.optimizer.state)
            self.optimizer = optimizer
