"""Gradient accounting for ZeRO stage 3."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from multiloss import _upstream
from multiloss.zero import ZeroParameter
from multiloss.zero.accounting import GradientAccounting
from multiloss.zero.parameter_offload import MultiLossZeRoOffload


class MultiLossZeroOptimizerStage3(GradientAccounting, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]  # no hints
    """ZeRO-3 optimizer in which any sequence of backwards adds up and ``zero_grad`` discards.

    Each backward reduce-scatters what it computed and adds it to this rank's partition of each gradient. The
    partitions are zeros after every step and every ``zero_grad``, so nothing has to know which backward is the first
    one, and a parameter that no backward reaches has a zero gradient.

    Args:
        args: As :class:`deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3`.
        kwargs: As above.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_bucket: set[int] = set()
        self._partitions_dirty = False
        self._stepping = False
        super().__init__(*args, **kwargs)
        self._follow_autograd()

    # -- what upstream asks -------------------------------------------------------------------------------------

    def initialize_ds_offload(self, *args: Any, **kwargs: Any) -> MultiLossZeRoOffload:
        """The parameter offload that survives several walks of a graph."""
        return MultiLossZeRoOffload(*args, **kwargs)

    def _link_all_hp_params(self) -> None:
        own = {param.ds_id for param in self._parameters()}
        for param in self.module.parameters():
            if param.ds_id in own or not param.requires_grad:
                param._z3_optimizer = self

    # -- during a backward --------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_ready_partitions_and_remove_grads(self, param: ZeroParameter) -> None:
        """Take ``param.grad``, which a backward has just accumulated, into the bucket."""
        if param.grad is None or self._coalesce_grad_reduction:
            return
        if param.grad.requires_grad:
            param.grad = param.grad.detach()
        if param.ds_id in self._in_bucket:
            # A nested graph task accumulated once more, in place, into the gradient that waits in the bucket.
            return
        super().reduce_ready_partitions_and_remove_grads(param)
        self._in_bucket.add(param.ds_id)

    def partition_grads(self, params_to_release: list[ZeroParameter], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Add reduced gradients to the partitions."""
        self.micro_step_id = 1  # upstream copies when this is 0 and adds otherwise
        self._partitions_dirty = True
        self._in_bucket.difference_update(param.ds_id for param in params_to_release)
        buffers: list[Tensor] = super().partition_grads(params_to_release, grad_partitions)
        return buffers

    def _open_backward(self) -> None:
        if self.swap_optimizer:
            self.optimizer_swapper.pre_backward()

    def _close_backward(self) -> None:
        self.independent_gradient_partition_epilogue()
        if self.swap_optimizer:
            self.optimizer_swapper.post_backward()

    # -- between backwards and the step -------------------------------------------------------------------------

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Make everything accumulated ready for :meth:`step`."""
        self._window.settle()
        with self._boundary():
            if self.offload_optimizer:
                # Parameters without a gradient too: their place in the fp32 buffer may hold an old one.
                self._offload_boundary_param_ids = {param.ds_id for param in self._parameters()}
            else:
                partitions = _upstream.gradient_partitions(self)
                for index, group in enumerate(self.fp16_groups):
                    self.averaged_gradients[index] = [partitions[param.ds_id] for param in group]
            super().finalize_gradient_accumulation_boundary()

    def gradient_shards(self) -> list[Tensor]:
        """This rank's part of the accumulated gradient, flat."""
        self._window.settle()
        self._partitions_dirty = True  # the caller may write into it
        return [self.grad_partitions_flat_buffer]

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """As upstream, with everything that was accumulated."""
        self.finalize_gradient_accumulation_boundary()
        partitions: dict[int, dict[int, Tensor]] = super().get_fp32_grad_partitions()
        return partitions

    def step(self, closure: Any = None) -> None:
        """Update the parameters with the finalized gradients and start clean."""
        self._stepping = True
        try:
            super().step(closure)
        finally:
            self._stepping = False
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard every gradient since the last step: accumulated, reduced, or waiting in the bucket.

        Args:
            set_to_none: Accepted for compatibility. Gradients live in the partitions, so ``.grad`` is always ``None``.
        """
        for param in self._parameters():
            param.grad = None
        super().zero_grad(set_to_none=True)
        if self._stepping:
            # Upstream clears ``.grad`` in the middle of a step, which still needs the partitions.
            return
        self._window.discard()
        self._in_bucket.clear()
        for bucket in self.ipg_buckets.values():
            bucket.clear_params()
        self._offload_boundary_param_ids = set()
        if self._partitions_dirty:
            self.grad_partitions_flat_buffer.zero_()
            self._partitions_dirty = False

    def _get_fp32_grad_state_partition(self, param: ZeroParameter, release_swap_buffers: bool) -> tuple[Tensor, int]:
        self._window.settle()
        self._partitions_dirty = True  # the caller may write into it
        group_index, _, _ = self.grad_position[self.get_param_id(param)]
        if not self.offload_optimizer or self._swappable_optimizer_subgroup(group_index):
            partition: tuple[Tensor, int] = super()._get_fp32_grad_state_partition(param, release_swap_buffers)
            return partition
        # The fp32 buffer is written by the step; until then the partition is the truth.
        return _upstream.gradient_partitions(self)[param.ds_id], group_index

    # -- helpers ------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterable[ZeroParameter]:
        return (param for group in self.fp16_groups for param in group)

    def _take_leftovers(self) -> None:
        for param in self._parameters():
            self.reduce_ready_partitions_and_remove_grads(param)
