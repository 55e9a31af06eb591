"""Gathering and releasing the parameters of ZeRO-3 over several walks of one graph."""

from typing import Any, TypeAlias

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from multiloss import _upstream
from multiloss.zero.window import BackwardWindow

ZeroModule: TypeAlias = Any
"""A ``torch.nn.Module`` with the attributes that DeepSpeed gives it."""

# Stands in a parameter's set of active modules for "a graph made by create_graph still needs it".
_HELD = -1


class MultiLossZeRoOffload(DeepSpeedZeRoOffload):  # type: ignore[misc]  # deepspeed has no type hints
    """Gathers each module's parameters in every walk of a graph and releases them after it, however often it is walked.

    Upstream counts a module's forwards and gathers in as many backwards, so the second walk of a retained graph finds
    empty parameters; and it counts a module's inputs down past zero, so that walk releases nothing. Here neither count
    runs out. What one walk needs at a time stays what a single backward needs.

    A backward with ``create_graph=True`` makes nodes that gather nothing when they are walked later, so a module walked
    that way keeps its parameters until the next optimizer step.

    Args:
        args: As :class:`deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload`.
        kwargs: As above.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module: ZeroModule = kwargs["module"] if "module" in kwargs else args[0]
        for submodule in module.modules():
            # Upstream keeps these closures of an earlier engine, with that engine's coordinator.
            for name in ("pre_bwd_fn", "post_bwd_fn", "ds_grad_inputs"):
                submodule.__dict__.pop(name, None)
        self._window = BackwardWindow(
            on_close=self.release_backward_leftovers, on_abandoned=self.release_backward_leftovers
        )
        self._root_forwards = 0
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def pre_sub_module_forward_function(self, sub_module: ZeroModule) -> None:
        """Gather ``sub_module`` before its forward."""
        if sub_module is self.module:
            self._root_forwards += 1
        super().pre_sub_module_forward_function(sub_module)

    @torch.no_grad()
    def post_sub_module_forward_function(self, sub_module: ZeroModule) -> None:
        """Release ``sub_module`` after its forward, and remember how many of its inputs need a gradient."""
        # A module may be called with different numbers of such inputs. Too high a count only postpones the release
        # to the end of the walk; too low a count would release parameters that the walk still needs.
        sub_module.ds_grad_inputs = max(getattr(sub_module, "ds_grad_inputs", 0), sub_module.ds_grads_remaining)
        if sub_module is self.module:
            self._root_forwards = max(self._root_forwards - 1, 0)
            if self._root_forwards:
                # A root that calls itself, as a LightningModule's training_step does, still runs.
                return
        super().post_sub_module_forward_function(sub_module)

    def pre_sub_module_backward_function(self, sub_module: ZeroModule) -> None:
        """Gather ``sub_module`` before its part of a walk."""
        hold = torch.is_grad_enabled()
        self._window.enter()
        super().pre_sub_module_backward_function(sub_module)
        # The caller counts down after this returns; a graph may be walked any number of times.
        sub_module.applied_pre_backward_ref_cnt += 1
        sub_module.ds_grads_remaining = getattr(sub_module, "ds_grad_inputs", 0)
        if hold:
            for param in iter_params(sub_module, recurse=z3_leaf_module(sub_module)):
                param.ds_active_sub_modules.add(_HELD)

    @torch.no_grad()
    def post_sub_module_backward_function(self, sub_module: ZeroModule) -> None:
        """Release ``sub_module`` after its part of a walk, if this walk gathered it.

        A second-order graph reaches a module's inputs without passing through its outputs.
        """
        if sub_module.ds_id in _upstream.active_backward_modules(self.get_param_coordinator()):
            super().post_sub_module_backward_function(sub_module)

    def begin_forward(self) -> None:
        """An outermost forward begins: an earlier one may have died half-way."""
        self._root_forwards = 0
