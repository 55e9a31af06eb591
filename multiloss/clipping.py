"""Gradient clipping on shards, equal to PyTorch's on the whole gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from multiloss.zero.stage3 import MultiLossZeroOptimizerStage3
from multiloss.zero.stage_1_and_2 import MultiLossZeroOptimizer

if TYPE_CHECKING:
    from multiloss.engine import MultiLossEngine


@torch.no_grad()
def clip_norm(engine: MultiLossEngine, max_norm: float) -> Tensor:
    """Scale the accumulated gradient so that its norm is at most ``max_norm``, as ``clip_grad_norm_`` does. Collective.

    Args:
        engine: Whose optimizer's gradient.
        max_norm: Of the gradient averaged over ranks and without loss scale.

    Returns:
        The 2-norm before clipping, a scalar, the same on every rank.
    """
    shards, sharded = _reduced_gradients(engine)
    loss_scale = _loss_scale(engine)
    square = sum((shard.float().square().sum() for shard in shards), torch.zeros(()))
    square = square.to(get_accelerator().current_device_name())
    if sharded:
        dist.all_reduce(square, group=engine.optimizer.dp_process_group)
    norm = square.sqrt() / loss_scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_
    for shard in shards:
        shard.mul_(factor.to(shard.device))
    return norm


@torch.no_grad()
def clip_value(engine: MultiLossEngine, limit: float) -> None:
    """Clamp every element of the accumulated gradient, as ``clip_grad_value_`` does. Collective.

    Args:
        engine: Whose optimizer's gradient.
        limit: Of the absolute value of an element, averaged over ranks and without loss scale.
    """
    shards, _ = _reduced_gradients(engine)
    limit = limit * _loss_scale(engine)
    for shard in shards:
        shard.clamp_(-limit, limit)


def _loss_scale(engine: MultiLossEngine) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def _reduced_gradients(engine: MultiLossEngine) -> tuple[Sequence[Tensor], bool]:
    """The accumulated gradient, averaged over ranks, and whether this rank has only a part of it."""
    if isinstance(engine.optimizer, (MultiLossZeroOptimizer, MultiLossZeroOptimizerStage3)):
        return engine.optimizer.gradient_shards(), True
    # Stage 0. The step averages again, which changes nothing in what is equal on all ranks.
    engine.buffered_allreduce_fallback(elements_per_buffer=engine.zero_reduce_bucket_size())
    params = [param for group in engine.parameter_groups for param in group]
    return [param.grad for param in params if param.grad is not None], False
