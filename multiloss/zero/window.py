"""When a backward begins and when it ends, as autograd itself knows it."""

import weakref
from collections.abc import Callable

import torch
from deepspeed.runtime.base_optimizer import BackwardHookStateManager
from torch.autograd import Variable


class _CloseToken:
    """The callback that autograd runs when the graph task ends.

    Autograd holds the only strong reference, so a dead weak reference says that the graph task is gone, whether it
    ended or was torn down by an exception.
    """

    def __init__(self, close: Callable[["_CloseToken"], None]) -> None:
        self._close = close

    def __call__(self) -> None:
        self._close(self)


class BackwardWindow:
    """The time from the first event of a backward to the end of its graph task.

    Nothing here depends on how the backward was started: ``engine.backward``, ``tensor.backward``, a loss that runs
    through several engines, a graph that is walked again, and a graph task nested by reentrant checkpointing all open
    the window with their first event and close it through a callback on the autograd engine. A window is per owner
    (one ZeRO optimizer, or the parameter offload), so one backward may open several.

    Args:
        on_open: Runs once at the first event of a backward.
        on_close: Runs once when the graph task that opened the window has ended, without grad mode.
        on_abandoned: Runs when the graph task died of an exception, at the next event or :meth:`settle`.
    """

    def __init__(
        self,
        on_open: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
        on_abandoned: Callable[[], None] | None = None,
    ) -> None:
        self._on_open = on_open
        self._on_close = on_close
        self._on_abandoned = on_abandoned
        self._token: weakref.ref[_CloseToken] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a backward of this owner is running, or died without closing."""
        return self._token is not None

    @property
    def is_running(self) -> bool:
        """Whether the backward that opened the window is running."""
        return self._token is not None and self._token() is not None

    def enter(self) -> None:
        """Open the window unless the backward that opened it is still running. Call only from an autograd hook."""
        if self.is_running:
            return
        self.settle()
        token = _CloseToken(self._close)
        Variable._execution_engine.queue_callback(token)
        self._token = weakref.ref(token)
        if self._on_open is not None:
            self._on_open()

    def settle(self) -> None:
        """Deal with what a backward that died of an exception left behind; nothing to do otherwise."""
        if self._token is None or self.is_running:
            return
        self._token = None
        if self._on_abandoned is not None:
            with torch.no_grad():
                self._on_abandoned()

    def discard(self) -> None:
        """Forget the window; a callback that is still queued then does nothing."""
        self._token = None

    def _close(self, token: _CloseToken) -> None:
        if self._token is None or self._token() is not token:
            return
        self._token = None
        if self._on_close is not None:
            with torch.no_grad():
                self._on_close()


class WindowedHookState(BackwardHookStateManager):  # type: ignore[misc]  # deepspeed has no type hints
    """The object that a ZeRO optimizer's gradient hooks talk to, on top of a :class:`BackwardWindow`.

    Upstream counts how many gradient hooks the running backward will fire and runs its epilogue on the last one, with
    state that is reset by the engine's forward. Here the window says when a backward ends, so nothing is counted and a
    forward changes nothing.

    Args:
        window: The optimizer's window.
    """

    def __init__(self, window: BackwardWindow) -> None:
        self.window = window
        super().__init__()

    @property
    def epilogue_ran_this_backward(self) -> bool:
        """Always false: upstream's forward would otherwise clear gradients or raise the micro step."""
        return False

    @epilogue_ran_this_backward.setter
    def epilogue_ran_this_backward(self, value: bool) -> None:
        pass

    def should_refresh_expected_hook_count(self) -> bool:
        """Never count the hooks of a backward."""
        return False

    def reenter_backward_if_needed(self) -> None:
        """Every gradient hook calls this first: the first one of a backward opens the window.

        The engine's registered hook runs before, and may refuse the backward.
        """
        if not self.window.is_running:
            self.run_grad_acc_post_hooks()
        self.window.enter()

    def run_grad_acc_post_hooks(self) -> None:
        """Run what the engine registered, whatever its depth count says."""
        for hook in self._grad_acc_post_hooks:
            hook()

    def update_hook_state_and_maybe_run_epilogue(self, current_expected_count: int) -> None:
        """The window runs the epilogue."""

    def queue_post_backward_callback(self) -> bool:
        """The window queues its own callback."""
        return True

    def enter_backward(self) -> None:
        """Nothing is entered by the engine's forward or backward."""

    def exit_backward(self) -> None:
        """Nothing is left by the engine's forward or backward."""

    def reset_for_new_step(self) -> None:
        """A forward resets nothing."""
