"""Multi-loss training on sharded models: several losses, one forward, any DeepSpeed ZeRO stage.

Importing this module registers the Lightning strategies ``deepspeed_multiloss``, ``deepspeed_multiloss_stage_0`` to
``_stage_3``, ``deepspeed_multiloss_stage_2_offload`` and ``deepspeed_multiloss_stage_3_offload``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from multiloss import _upstream

_upstream.check()

from multiloss._cpu import disable_shared_memory_collective  # noqa: E402  # only after the check
from multiloss.engine import MultiLossEngine, initialize  # noqa: E402
from multiloss.optimizer import MultiLossOptimizer  # noqa: E402
from multiloss.strategy import DeepSpeedMultiLossStrategy  # noqa: E402

__version__ = "0.1.0"

__all__ = ["DeepSpeedMultiLossStrategy", "MultiLossEngine", "MultiLossOptimizer", "initialize"]

disable_shared_memory_collective()
DeepSpeedMultiLossStrategy.register_strategies(StrategyRegistry)
