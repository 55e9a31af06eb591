"""Counts what ZeRO gathers, holds and reduces."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn


@dataclass
class Counts:
    """In elements of parameters or gradients."""

    gathered: int = 0
    peak: int = 0
    reduced: int = 0


def gathered_numel(params: Iterable[Any]) -> int:
    """The elements of the parameters that are gathered or on their way."""
    return sum(param.ds_numel for param in params if param.ds_status != ZeroParamStatus.NOT_AVAILABLE)


@contextmanager
def counting(module: nn.Module) -> Iterator[Counts]:
    """Count for the parameters of ``module``, with stock DeepSpeed and with multiloss alike."""
    counts = Counts()
    params = list(module.parameters())
    fetch = PartitionedParameterCoordinator.fetch_sub_module
    partition_grads = DeepSpeedZeroOptimizer_Stage3.partition_grads
    average_tensor = DeepSpeedZeroOptimizer.average_tensor

    def counting_fetch(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = gathered_numel(params)
        result = fetch(self, *args, **kwargs)
        after = gathered_numel(params)
        counts.gathered += after - before
        counts.peak = max(counts.peak, after)
        return result

    def counting_partition(self: Any, params_to_release: Any, *args: Any) -> Any:
        counts.reduced += sum(param.ds_numel for param in params_to_release)
        return partition_grads(self, params_to_release, *args)

    def counting_average(self: Any, tensor: Any, *args: Any) -> Any:
        counts.reduced += tensor.numel()
        return average_tensor(self, tensor, *args)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (PartitionedParameterCoordinator, "fetch_sub_module", counting_fetch),
            (DeepSpeedZeroOptimizer_Stage3, "partition_grads", counting_partition),
            (DeepSpeedZeroOptimizer, "average_tensor", counting_average),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield counts
