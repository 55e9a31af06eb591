"""The Lightning strategy."""

from __future__ import annotations

import argparse
import copy
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator, set_accelerator
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.plugins import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.deepspeed import _validate_device_index_selection
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from multiloss.engine import MultiLossEngine, initialize, substituted_classes
from multiloss.precision import MultiLossPrecision

STAGES = (0, 1, 2, 3)

# The arguments that DeepSpeedStrategy uses when it is given a DeepSpeed config, too.
BESIDE_CONFIG = {
    "accelerator",
    "cluster_environment",
    "config",
    "exclude_frozen_parameters",
    "hysteresis",
    "initial_scale_power",
    "load_full_weights",
    "logging_level",
    "loss_scale",
    "loss_scale_window",
    "min_loss_scale",
    "parallel_devices",
    "precision_plugin",
    "process_group_backend",
    "remote_device",
    "timeout",
}


class DeepSpeedMultiLossStrategy(DeepSpeedStrategy):
    """DeepSpeed ZeRO for LightningModules that back-propagate several losses separately.

    A LightningModule that trains under ``strategy="ddp"`` runs unchanged and ends with the same weights, in manual and
    in automatic optimization. ``manual_backward(loss, retain_graph=True)`` adds to the gradients, ``opt.zero_grad()``
    discards them, ``opt.step()`` consumes them. Runs on CUDA, and on the CPU with gloo.

    Gradient clipping is done on the shards and equals PyTorch's, by norm and by value. Gradient accumulation in
    automatic optimization is Lightning's own.

    Args:
        args: As :class:`lightning.pytorch.strategies.DeepSpeedStrategy`.
        kwargs: As :class:`lightning.pytorch.strategies.DeepSpeedStrategy`, except that ``overlap_comm`` is off by
            default in stages 0 and 1, which have no backward to overlap with.

    Raises:
        TypeError: For an argument that DeepSpeedStrategy does not have.
        ValueError: For a stage that is not 0, 1, 2 or 3, for ``overlap_comm=True`` in stages 0 and 1, and for arguments
            that a config would override.
    """

    strategy_name = "deepspeed_multiloss"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = _bind(args, kwargs)
        _check_beside_config(arguments, cls_name=type(self).__name__)
        if isinstance(arguments.get("config"), dict):
            arguments["config"] = copy.deepcopy(arguments["config"])  # Lightning writes into it
        stage = arguments.get("stage", 2) if arguments.get("zero_optimization", True) else 0
        if stage not in STAGES:
            raise ValueError(f"DeepSpeedMultiLossStrategy(stage={stage!r}): the stage must be one of {STAGES}.")
        if stage <= 1:
            arguments.setdefault("overlap_comm", False)
        super().__init__(**arguments)
        self._check_config()
        # Offload works with every torch optimizer; DeepSpeed's own demand for DeepSpeedCPUAdam is about speed.
        assert isinstance(self.config, dict)
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``deepspeed_multiloss`` and its variants."""
        name = cls.strategy_name
        strategy_registry.register(name, cls, description="Multi-loss DeepSpeed, ZeRO stage 2")
        for stage in STAGES:
            description = f"Multi-loss DeepSpeed, ZeRO stage {stage}"
            strategy_registry.register(f"{name}_stage_{stage}", cls, description=description, stage=stage)
        strategy_registry.register(
            f"{name}_stage_2_offload",
            cls,
            description="Multi-loss DeepSpeed, ZeRO stage 2, optimizer on the CPU",
            stage=2,
            offload_optimizer=True,
        )
        strategy_registry.register(
            f"{name}_stage_3_offload",
            cls,
            description="Multi-loss DeepSpeed, ZeRO stage 3, optimizer and parameters on the CPU",
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
        )

    # -- configuration ------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        """Routes backwards and steps to the engine."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The Trainer chooses Lightning's own plugin for every DeepSpeedStrategy.
        if type(precision_plugin) is DeepSpeedPrecision:
            precision_plugin = MultiLossPrecision(precision_plugin.precision)  # type: ignore[arg-type]
        if precision_plugin is not None and not isinstance(precision_plugin, MultiLossPrecision):
            raise MisconfigurationException(
                f"{type(self).__name__} got the precision plugin {type(precision_plugin).__name__}. Pass"
                " `Trainer(precision=...)`, or a subclass of `multiloss.precision.MultiLossPrecision`."
            )
        self._precision_plugin = precision_plugin

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Lightning divides and counts, as for every other strategy; the engine steps when it is told to."""
        return False

    def _check_config(self) -> None:
        assert isinstance(self.config, dict)
        zero = self.config.get("zero_optimization") or {}
        stage = zero.get("stage", 0)
        if stage not in STAGES:
            raise ValueError(f"The DeepSpeed config asks for ZeRO stage {stage!r}; it must be one of {STAGES}.")
        if stage <= 1 and zero.get("overlap_comm"):
            raise ValueError(
                f"overlap_comm=True is not possible with ZeRO stage {stage}: gradients are reduced once, in the"
                " optimizer's step, so there is no backward to overlap with. Leave it out, or use stage 2 or 3."
            )

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        own_clipping = self.config.get("gradient_clipping")
        super()._format_batch_size_and_grad_accum_config()
        module = self.lightning_module
        if module is None:
            return
        clip_val = module.trainer.gradient_clip_val
        if own_clipping and clip_val:
            raise MisconfigurationException(
                f"Both `Trainer(gradient_clip_val={clip_val})` and the DeepSpeed config's"
                f" gradient_clipping={own_clipping} are set. Keep one of them."
            )
        # Lightning clips and accumulates; DeepSpeed's own default would clip at 1.0.
        self.config["gradient_clipping"] = own_clipping or 0.0
        self.config["gradient_accumulation_steps"] = 1

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients accumulate where they are reduced to; there is nothing to block."""
        yield

    # -- setup --------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        """Start the ranks' process group, on CUDA or on the CPU."""
        if not isinstance(self.accelerator, (CPUAccelerator, CUDAAccelerator)):
            raise MisconfigurationException(
                f"{type(self).__name__} runs on CUDA and on the CPU, got {type(self.accelerator).__name__}. Pass"
                ' `Trainer(accelerator="cuda")` or `Trainer(accelerator="cpu")`.'
            )
        if isinstance(self.accelerator, CPUAccelerator) and get_accelerator().device_name() != "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        # Past DeepSpeedStrategy, which refuses everything but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
        """As upstream; device indices exist on CUDA only."""
        assert self.parallel_devices is not None
        if self.root_device.type == "cuda":
            _validate_device_index_selection(self.parallel_devices)
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]  # as upstream
        if self._layer_sync and self.lightning_module and self.lightning_module.trainer.training:
            model = self._layer_sync.apply(model)
        return super()._setup_model(model)

    @override
    def init_deepspeed(self) -> None:
        """Build the engine. Upstream refuses clipping by value here, and warns that clipping does nothing."""
        assert isinstance(self.model, LightningModule)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training:
            self._initialize_deepspeed_train(self.model)
        else:
            self._initialize_deepspeed_inference(self.model)

    @override
    def _initialize_deepspeed_train(self, model: Module) -> None:
        optimizer, scheduler_configs = self._configure_optimizer()
        engine, wrapped, _, scheduler = initialize(
            args=argparse.Namespace(device_rank=self.root_device.index),
            config=self.config,
            model=model,
            model_parameters=[param for param in model.parameters() if param.requires_grad],
            optimizer=optimizer,
            dist_init_required=False,
        )
        self._set_deepspeed_activation_checkpointing()
        assert wrapped is not None
        if scheduler is not None:  # from the DeepSpeed config; Lightning steps it, as upstream
            engine.lr_scheduler = None
            scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]
        for config in scheduler_configs:
            # So that LearningRateMonitor and the user find one and the same optimizer.
            config.scheduler.optimizer = wrapped
        self.optimizers = [wrapped]
        self.lr_scheduler_configs = scheduler_configs
        self.model = engine

    def _configure_optimizer(self) -> tuple[Optimizer | None, list[LRSchedulerConfig]]:
        assert isinstance(self.config, dict)
        assert self.lightning_module is not None
        if "optimizer" in self.config:
            return None, []
        optimizers, scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        if len(optimizers) > 1:
            raise MisconfigurationException(
                f"`configure_optimizers` returned {len(optimizers)} optimizers; this version of"
                f" {type(self).__name__} supports one. Return a single optimizer, with one parameter group for each set"
                " of parameters."
            )
        if isinstance(optimizers[0], _MockOptimizer):
            raise MisconfigurationException(
                f"`configure_optimizers` returned None, and {type(self).__name__} needs an optimizer to shard. Return"
                ' one, or name one under "optimizer" in the DeepSpeed config.'
            )
        return optimizers[0], scheduler_configs

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        with substituted_classes():
            super()._initialize_deepspeed_inference(model)

    @override
    def teardown(self) -> None:
        """Destroy the engine, so that its hooks do not see the next one's gradients."""
        if isinstance(self.model, MultiLossEngine):
            self.model.destroy()
            self.model = self.lightning_module
        super().teardown()


def _check_beside_config(arguments: dict[str, Any], cls_name: str) -> None:
    """Raise for arguments that DeepSpeedStrategy would ignore because a DeepSpeed config is given."""
    source = "`config`" if arguments.get("config") is not None else None
    if source is None and DeepSpeedStrategy.DEEPSPEED_ENV_VAR in os.environ:
        source = f"the environment variable {DeepSpeedStrategy.DEEPSPEED_ENV_VAR}"
    ignored = sorted(set(arguments) - BESIDE_CONFIG)
    if source is not None and ignored:
        raise ValueError(
            f"{cls_name} got a DeepSpeed config by {source}, and {', '.join(ignored)}, which the config would override."
            " Put them into the config, or leave the config out."
        )


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, or a ``TypeError`` that lists the ones that exist."""
    signature = inspect.signature(DeepSpeedStrategy.__init__)
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        raise TypeError(f"DeepSpeedMultiLossStrategy: {error}. Its arguments are: {names}.") from None
    arguments = dict(bound.arguments)
    del arguments["self"]
    return arguments
