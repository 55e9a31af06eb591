"""Checks of what users pass in: each raises with what was got, what is allowed and what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from deepspeed.pipe import PipelineModule
from torch import Tensor
from torch.optim import LBFGS, Optimizer

if TYPE_CHECKING:
    from multiloss.engine import MultiLossEngine


def check_loss(engine: MultiLossEngine, loss: Any, method: str) -> None:
    """Raise unless ``loss`` can be back-propagated and ``engine`` has an optimizer."""
    if not engine.has_optimizer:
        raise RuntimeError(
            f"engine.{method}(loss) needs an optimizer, and the engine has none. Pass optimizer=... to"
            ' multiloss.initialize, or name one under "optimizer" in the DeepSpeed config.'
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"engine.{method}(loss) needs a tensor with one element, got {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"engine.{method}(loss) needs a tensor with one element, got shape {tuple(loss.shape)}. Reduce it first,"
            " for example with loss.mean()."
        )
    if not loss.requires_grad:
        raise ValueError(
            f"engine.{method}(loss) needs a loss with a graph, got one that requires no gradient. Was it computed under"
            " torch.no_grad(), detached, or only from frozen parameters?"
        )


def check_path(path: Any, method: str) -> None:
    """Raise unless ``path`` names a place for a checkpoint."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"engine.{method} needs the path of a checkpoint directory, got {path!r}.")


def check_config(engine: MultiLossEngine) -> None:
    """Raise if the engine's DeepSpeed config asks for something that several backwards cannot be exact with."""
    stage = int(engine.zero_optimization_stage())
    if stage <= 1 and engine.zero_overlap_comm():
        raise ValueError(
            f"overlap_comm=True is not possible with ZeRO stage {stage}: gradients are reduced once, in step(), so"
            " there is no backward to overlap with. Set overlap_comm to false, or use stage 2 or 3."
        )
    refused = {
        "DeepCompile (compile.deepcompile)": engine.is_deepcompile_enabled(),
        "ZenFlow (zero_optimization.zenflow)": engine.zenflow_config() is not None,
        "SuperOffload (zero_optimization.offload_optimizer.super_offload)": engine.super_offload(),
    }
    for name, asked in refused.items():
        if asked:
            raise ValueError(
                f"multiloss does not support {name}: it computes or applies gradients by itself, in a way that several"
                " backwards before a step would break. Remove it from the DeepSpeed config."
            )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise for an optimizer that several backwards cannot be exact with."""
    if type(optimizer).__name__.startswith("Muon"):
        raise ValueError(
            f"multiloss does not support {type(optimizer).__name__}: DeepSpeed orthogonalizes its update from within"
            " the reduction, before it is known which backward is the last. Use another optimizer."
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "multiloss does not support LBFGS: it evaluates the closure several times per step, and a sharded step has"
            " the gradient of one evaluation. Use another optimizer."
        )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise for arguments of ``initialize`` that another engine than ours would be built for."""
    model = arguments.get("model")
    if isinstance(model, PipelineModule):
        raise ValueError(
            "multiloss got a PipelineModule, whose engine runs forward and backward itself. Pass an ordinary"
            " torch.nn.Module."
        )
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, (list, tuple)):
        raise NotImplementedError(
            f"multiloss.initialize got {len(optimizer)} optimizers in a {type(optimizer).__name__}; this version"
            " supports one. Pass a single optimizer, with one parameter group for each set of parameters."
        )
    config = arguments.get("config") or arguments.get("config_params")
    if isinstance(config, dict) and config.get("hybrid_engine", {}).get("enabled"):
        raise ValueError(
            'multiloss does not support DeepSpeed\'s hybrid engine. Remove "hybrid_engine" from the config, or set its'
            ' "enabled" to false.'
        )
