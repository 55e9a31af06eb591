"""Gradient accounting for ZeRO stages 1 and 2."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from multiloss.zero import ZeroParameter
from multiloss.zero.accounting import GradientAccounting


class MultiLossZeroOptimizer(GradientAccounting, DeepSpeedZeroOptimizer):  # type: ignore[misc]  # no type hints
    """ZeRO-1/2 optimizer in which any sequence of backwards adds up and ``zero_grad`` discards.

    Every reduction is added straight into this rank's partition of the flat gradient, which upstream already has for
    fp32 accumulation of low-precision gradients and which is used here for every dtype. The partition starts as zeros,
    so a parameter that no backward reaches has a zero gradient. In stage 2 each backward reduces what it computed; in
    stage 1 gradients accumulate on their rank and are reduced by the step, or earlier when someone asks for a full
    gradient.

    Args:
        args: As :class:`deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer`.
        kwargs: As above.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_bucket: set[int] = set()
        self._in_flight: list[Tensor] = []
        super().__init__(*args, **kwargs)
        self._follow_autograd()

    # -- what upstream asks -------------------------------------------------------------------------------------

    @property
    def use_grad_accum_attribute(self) -> bool:
        """Stage 1 keeps its unreduced sums out of ``.grad``, which means the reduced gradient to other code."""
        return not self.partition_gradients

    @use_grad_accum_attribute.setter
    def use_grad_accum_attribute(self, value: bool) -> None:
        pass

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        return True

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        for param in self._parameters():
            if param._hp_mapping is not None:
                # The partition buffer is the truth; the CPU copy is written by the step.
                param._hp_mapping.use_offload = False
            param.get_full_hp_grad = _AfterReduction(self, param.get_full_hp_grad)
            param.set_full_hp_grad = _AfterReduction(self, param.set_full_hp_grad)

    # -- during a backward --------------------------------------------------------------------------------------

    @torch.no_grad()
    def process_gradients(self, param: ZeroParameter, i: int) -> None:
        """Take ``param.grad``, which a backward has just accumulated, into the bucket (stage 2) or the local sum."""
        if param.grad is None or self._coalesce_grad_reduction:
            return
        if param.grad.requires_grad:
            param.grad = param.grad.detach()
        if not self.partition_gradients:
            self._fill_param_grad_accum_attribute(param)
            return
        param_id = self.get_param_id(param)
        if param_id in self._in_bucket:
            # A nested graph task accumulated once more, in place, into the gradient that waits in the bucket.
            return
        super().process_gradients(param, i)
        self._in_bucket.add(param_id)

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Reduce the bucket; its gradients are then in the partitions and nowhere else."""
        buckets = self.ipg_buckets.values() if comm_dtype is None else [self.ipg_buckets[comm_dtype]]
        reduced = [param_id for bucket in buckets for _, _, param_id in bucket.params]
        super().reduce_ipg_grads(comm_dtype=comm_dtype)
        if self.overlap_comm and not self.contiguous_gradients:
            # Another stream still reads them; the next reduction and the end of the backward wait for it.
            self._in_flight = [self.param_dict[param_id].grad for param_id in reduced]
            self.previous_reduced_grads.clear()
        for param_id in reduced:
            self._in_bucket.discard(param_id)
            self.params_already_reduced[param_id] = False
            self.clear_grad_attribute(self.param_dict[param_id])

    def _close_backward(self) -> None:
        if self.partition_gradients and self.ready_for_gradients:
            self.overlapping_partition_gradients_reduce_epilogue()
        self._in_flight.clear()

    # -- between backwards and the step -------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_local_sums(self) -> None:
        """Make the partitions hold everything that was accumulated. Collective; a no-op in stage 2.

        Ranks may have reached different parameters; where one has a gradient and another has none, that is zero.
        """
        self._window.settle()
        if self.partition_gradients or not self._share_local_sums():
            return
        self.setup_buckets()
        with self._boundary():
            super().reduce_gradients()

    def prepare_partitions(self) -> None:
        """Make every partition exist and hold everything that was accumulated. Collective in stage 1."""
        self.reduce_local_sums()
        for index in range(len(self.bit16_groups)):
            self._get_compact_grad_partition_buffer(index)

    def gradient_shards(self) -> list[Tensor]:
        """This rank's part of the accumulated gradient, one flat tensor per parameter group. Collective in stage 1."""
        self.prepare_partitions()
        return [self.averaged_gradients[index].flat_partition for index in range(len(self.bit16_groups))]

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Stage 1, at the step: reduce and finalize. Collective."""
        self.finalize_gradient_accumulation_boundary()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Make everything accumulated ready for :meth:`step`. Collective in stage 1."""
        self.reduce_local_sums()
        with self._boundary():
            if self.cpu_offload:
                # Parameters without a gradient too: their place in the CPU buffer may hold an old one.
                self._offload_accumulated_param_ids = {
                    self.get_param_id(param) for group in self.params_in_partition for param in group
                }
            super().finalize_gradient_accumulation_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard every gradient since the last step: accumulated, reduced, or waiting in a bucket.

        Args:
            set_to_none: Accepted for compatibility. Gradients live in the partitions, so ``.grad`` is always ``None``.
        """
        self._window.discard()
        super().zero_grad(set_to_none=True)
        self._in_bucket.clear()
        for bucket in self.ipg_buckets.values():
            bucket.clear()
        self.extra_large_param_to_reduce.clear()
        self.previous_reduced_grads.clear()
        self.params_already_reduced = [False] * len(self.param_dict)
        for index in range(len(self.bit16_groups)):
            self.averaged_gradients[index] = None
            self.all_grad_tensors[index] = None
        if self.cpu_offload:
            self._offload_accumulated_param_ids.clear()
            self.reset_cpu_buffers()
        self._release_ipg_buffers()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterable[ZeroParameter]:
        return (param for group in self.bit16_groups for param in group)

    def _take_leftovers(self) -> None:
        for index, group in enumerate(self.bit16_groups):
            for param in group:
                self.process_gradients(param, index)

    def _share_local_sums(self) -> bool:
        """Give a zero to each parameter that only other ranks have a gradient for; false when nobody has any."""
        params = [param for param in self._parameters() if param.numel()]
        device = get_accelerator().current_device_name()
        reached = torch.tensor([param.grad_accum is not None for param in params], dtype=torch.uint8, device=device)
        dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        for param, anywhere in zip(params, reached.tolist(), strict=True):
            if anywhere and param.grad_accum is None:
                param.grad_accum = torch.zeros_like(param, dtype=self.gradient_accumulation_dtype)
        return bool(reached.any())


class _AfterReduction:
    """A parameter's method that reads or writes its full gradient: first bring the partitions up to date.

    ``safe_get_full_grad`` and ``safe_set_full_grad`` call these methods. Collective, as those are.
    """

    def __init__(self, optimizer: MultiLossZeroOptimizer, upstream: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._upstream = upstream

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._optimizer.prepare_partitions()
        return self._upstream(*args, **kwargs)
