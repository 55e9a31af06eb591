"""ZeRO optimizers whose gradients follow autograd instead of the engine's forward."""

from typing import Any, TypeAlias

ZeroParameter: TypeAlias = Any
"""A ``torch.nn.Parameter`` with the attributes that DeepSpeed gives it."""
