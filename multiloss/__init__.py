"""Multi-loss training on sharded models: several losses, one forward, any DeepSpeed ZeRO stage."""

from multiloss import _upstream

_upstream.check()

from multiloss._cpu import disable_shared_memory_collective  # noqa: E402  # only after the check
from multiloss.engine import MultiLossEngine, initialize  # noqa: E402
from multiloss.optimizer import MultiLossOptimizer  # noqa: E402

__version__ = "0.1.0"

__all__ = ["MultiLossEngine", "MultiLossOptimizer", "initialize"]

disable_shared_memory_collective()
