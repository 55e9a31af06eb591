"""LightningModules under the strategy: weights, hooks, counters, logs and errors."""

from __future__ import annotations

from typing import Any

import deepspeed
import lightning as L  # noqa: N812  # as its documentation does
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from multiloss import DeepSpeedMultiLossStrategy, MultiLossEngine, MultiLossOptimizer
from tests import models
from tests.ranks import Ranks
from tests.test_contract import TOLERANCE, ZERO3

SAMPLES = 48
PER_RANK = 4
NAMES = [
    "deepspeed_multiloss",
    "deepspeed_multiloss_stage_0",
    "deepspeed_multiloss_stage_1",
    "deepspeed_multiloss_stage_2",
    "deepspeed_multiloss_stage_3",
]


class Base(L.LightningModule):
    """A shared trunk and two heads; records what happens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = models.MultiHead(2)
        self.offset = nn.Parameter(torch.full((3,), 0.5))  # of the root module itself
        self.seen: list[Any] = []
        self.final: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Both heads, shifted."""
        return tuple(output + self.offset for output in self.net(x))

    def losses(self, x: Tensor) -> list[Tensor]:
        """One per head."""
        return [models.loss_of(output, head) for head, output in enumerate(self(x))]

    def on_train_end(self) -> None:
        """Keep full weights while the engine is alive."""
        named = dict(self.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=hasattr(self.offset, "ds_id")):
            self.final = {name: param.detach().clone() for name, param in named.items()}

    def configure_optimizers(self) -> Any:
        """Momentum, so that stale gradients would show."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Manual(Base):
    """Each loss by its own backward, ``zero_grad`` between, closures, accumulation, a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        """Another order in every step."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        first, second = self.losses(batch[0])
        if index % 3 == 0:
            optimizer.zero_grad()
            self.manual_backward(first, retain_graph=True)
            self.manual_backward(second)
            optimizer.step()
        elif index % 3 == 1:
            self.manual_backward(second, retain_graph=True)
            optimizer.zero_grad()
            self.manual_backward(first, retain_graph=True)
            self.manual_backward(second * self.offset.sum())
            optimizer.step()
        else:

            def closure() -> Tensor:
                optimizer.zero_grad()
                self.manual_backward(first, retain_graph=True)
                self.manual_backward(second, retain_graph=True)
                return first

            optimizer.step(closure)  # type: ignore[arg-type]  # torch's hint says float
        scheduler.step()  # type: ignore[union-attr]
        self.log_dict({"first": first, "second": second}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """With a scheduler that the user steps."""
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)]

    def on_before_backward(self, loss: Tensor) -> None:
        """Recorded."""
        self.seen.append("before_backward")

    def on_after_backward(self) -> None:
        """Recorded."""
        self.seen.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Recorded, with the rate."""
        self.seen.append(("before_step", round(optimizer.param_groups[0]["lr"], 6)))


class Late(Manual):
    """Makes its parameters in ``configure_model``, sharded from the start in stage 3."""

    def __init__(self) -> None:
        super().__init__()
        del self.net, self.offset

    def configure_model(self) -> None:
        """Once."""
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = models.MultiHead(2)
            self.offset = nn.Parameter(torch.full((3,), 0.5))


class Automatic(Base):
    """Lightning's own loop."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The sum."""
        first, second = self.losses(batch[0])
        return first + second

    def configure_optimizers(self) -> Any:
        """With a scheduler that Lightning steps."""
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OwnClipping(Automatic):
    """Clips in its own hook."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """A fixed value."""
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class OwnBackward(Manual):
    """Overrides ``backward``."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Twice the gradient."""
        (2 * loss).backward(*args, **kwargs)


class ManuallyClipped(Manual):
    """Clips one loss's gradient before the other's is added."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        """Norm and value in turn."""
        optimizer = self.optimizers()
        first, second = self.losses(batch[0])
        self.manual_backward(first, retain_graph=True)
        self.clip_gradients(optimizer, 0.1, "norm" if index % 2 else "value")  # type: ignore[arg-type]
        self.manual_backward(second)
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


def loader(batch_size: int) -> DataLoader[Any]:
    """Not shuffled: the ranks' batches together are the plain one."""
    data = TensorDataset(torch.cat([models.batch(key, 0) for key in range(SAMPLES // 4)]))
    sampler: Any = DistributedSampler(data, shuffle=False) if torch.distributed.is_initialized() else None
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def trainer_on_rank(strategy: Any, **kwargs: Any) -> L.Trainer:
    """A Trainer in a process that is already a rank."""
    defaults = {
        "accelerator": "cpu",
        "devices": torch.distributed.get_world_size(),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "plugins": [TorchElasticEnvironment()],
    }
    return L.Trainer(strategy=strategy, **{**defaults, **kwargs})


def make_strategy(strategy: str) -> Any:
    """A name, or ``"instance"``: ZeRO-3 in which every parameter is released at once."""
    if strategy != "instance":
        return strategy
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 80, **ZERO3}
    return DeepSpeedMultiLossStrategy(config={"zero_allow_untested_optimizer": True, "zero_optimization": zero})


def fit(module: type[Base], strategy: str, **kwargs: Any) -> tuple[dict[str, Tensor], list[Any], int]:
    """On a rank: weights, what the module recorded, and ``global_step``."""
    model = module()
    trainer = trainer_on_rank(make_strategy(strategy), **kwargs)
    trainer.fit(model, loader(PER_RANK))
    return model.final, model.seen, trainer.global_step


def fit_with(module: type[Base], strategy: str, kwargs: dict[str, Any]) -> Any:
    """As :func:`fit`, for sending."""
    return fit(module, strategy, **kwargs)


def fit_plain(module: type[Base], world_size: int, **kwargs: Any) -> tuple[dict[str, Tensor], list[Any], int]:
    """The same in plain Lightning, in one process that sees every rank's batch."""
    model = module()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    trainer.fit(model, loader(PER_RANK * world_size))
    return model.final, model.seen, trainer.global_step


def assert_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to rounding."""
    assert set(weights) == set(expected)
    for name, weight in weights.items():
        difference = (weight - expected[name]).abs().max().item()
        assert difference <= TOLERANCE, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("strategy", [*NAMES, "instance"])
@pytest.mark.parametrize("module", [Manual, OwnBackward, ManuallyClipped])
def test_manual_optimization(pair: Ranks, module: type[Base], strategy: str) -> None:
    """Several losses per step give plain Lightning's weights; hooks, rates and ``global_step`` are the same."""
    expected, expected_seen, expected_step = fit_plain(module, 2)
    for weights, seen, global_step in pair.run(fit_with, module, strategy, {}):
        assert_weights(weights, expected)
        assert seen == expected_seen
        assert global_step == expected_step


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("strategy", ["deepspeed_multiloss_stage_1", "deepspeed_multiloss_stage_2", "instance"])
def test_manual_optimization_on_other_world_sizes(pools: dict[int, Ranks], strategy: str, world_size: int) -> None:
    """One rank and four."""
    expected, *_ = fit_plain(Manual, world_size)
    for weights, *_ in pools[world_size].run(fit_with, Manual, strategy, {}):
        assert_weights(weights, expected)


@pytest.mark.parametrize("strategy", ["deepspeed_multiloss_stage_2", "deepspeed_multiloss_stage_3", "instance"])
def test_configure_model(pair: Ranks, strategy: str) -> None:
    """A module that is built under ``deepspeed.zero.Init``."""
    expected, *_ = fit_plain(Manual, 2)
    for weights, *_ in pair.run(fit_with, Late, strategy, {}):
        assert_weights(weights, expected)


TRAINER_FLAGS: dict[str, tuple[type[Base], dict[str, Any]]] = {
    "nothing": (Automatic, {}),
    "accumulation": (Automatic, {"accumulate_grad_batches": 4}),
    "clipping by norm": (Automatic, {"gradient_clip_val": 0.05}),
    "clipping by value": (Automatic, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "own clipping": (OwnClipping, {}),
    "both, and max_steps": (Automatic, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_steps": 5}),
}


@pytest.mark.parametrize("strategy", [*NAMES[1:], "instance"])
@pytest.mark.parametrize("flags", TRAINER_FLAGS)
def test_automatic_optimization(pair: Ranks, flags: str, strategy: str) -> None:
    """The weights and ``global_step`` are those of ``strategy="ddp"`` on the same ranks."""
    module, kwargs = TRAINER_FLAGS[flags]
    expected = pair.run(fit_with, module, "ddp", kwargs)
    for (weights, _, step), (ddp_weights, _, ddp_step) in zip(
        pair.run(fit_with, module, strategy, kwargs), expected, strict=True
    ):
        assert_weights(weights, ddp_weights)
        assert step == ddp_step


class Evaluated(Manual):
    """Evaluates, too."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """A score."""
        self.log("score", self(batch[0])[0].mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The first head."""
        first: Tensor = self(batch[0])[0]
        return first


def fit_evaluate_fit(strategy: str, folder: str) -> dict[str, Any]:
    """Fit with a validation, a logger and a progress bar; validate, test and predict; fit again."""
    model = Evaluated()
    trainer = trainer_on_rank(
        make_strategy(strategy),
        logger=CSVLogger(folder, name=strategy),
        callbacks=[LearningRateMonitor("step")],
        log_every_n_steps=1,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    trainer.fit(model, loader(PER_RANK), loader(PER_RANK))
    assert isinstance(trainer.callback_metrics["score"], Tensor)
    result: dict[str, Any] = {
        "validate": trainer.validate(model, loader(PER_RANK), verbose=False)[0]["score"],
        "test": trainer.test(model, loader(PER_RANK), verbose=False)[0]["score"],
    }
    predictions = trainer.predict(model, loader(PER_RANK))
    assert predictions is not None
    result["predictions"] = torch.cat(predictions)  # type: ignore[arg-type]
    second = trainer_on_rank(make_strategy(strategy))
    second.fit(model, loader(PER_RANK))
    return {**result, "weights": model.final, "metrics": dict(trainer.logged_metrics)}


@pytest.mark.parametrize("strategy", [*NAMES[1:], "instance"])
def test_evaluation_and_a_second_fit(pair: Ranks, strategy: str, tmp_path: Any) -> None:
    """validate, test and predict after fit see the trained weights, and a second fit goes on from them."""
    model = Evaluated()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    L.Trainer(max_epochs=2, enable_model_summary=False, **quiet).fit(model, loader(2 * PER_RANK))  # type: ignore[arg-type]
    with torch.no_grad():
        outputs = model(torch.cat([batch[0] for batch in loader(2 * PER_RANK)]))[0]
    score = outputs.mean().item()
    L.Trainer(max_epochs=2, enable_model_summary=False, **quiet).fit(model, loader(2 * PER_RANK))  # type: ignore[arg-type]
    results = pair.run(fit_evaluate_fit, strategy, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["validate"] == pytest.approx(score, abs=1e-5)
        assert result["test"] == pytest.approx(score, abs=1e-5)
        torch.testing.assert_close(result["predictions"], outputs[rank::2], atol=1e-5, rtol=0)
        assert_weights(result["weights"], model.final)
    lines = (tmp_path / strategy / "version_0" / "metrics.csv").read_text().splitlines()
    assert {"first", "second", "lr-SGD", "score"} <= set(lines[0].split(","))


def resumed(strategy: str, folder: str) -> tuple[float, list[int]]:
    """The largest difference between two epochs at once and one, a checkpoint, a new trainer and another."""
    first, second, straight = Manual(), Manual(), Manual()
    trainer = trainer_on_rank(make_strategy(strategy), max_epochs=1, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(first, loader(PER_RANK))
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    trainers = [trainer_on_rank(make_strategy(strategy)) for _ in range(2)]
    trainers[0].fit(second, loader(PER_RANK), ckpt_path=path)
    trainers[1].fit(straight, loader(PER_RANK))
    difference = max((second.final[name] - weight).abs().max().item() for name, weight in straight.final.items())
    return difference, [trainer.global_step for trainer in trainers]


@pytest.mark.parametrize("strategy", [*NAMES[1:], "instance"])
def test_resuming_from_a_checkpoint(pair: Ranks, strategy: str, tmp_path: Any) -> None:
    """Resuming is exact to the last bit."""
    for difference, steps in pair.run(resumed, strategy, str(tmp_path)):
        assert difference == 0
        assert steps[0] == steps[1]


def kinds(strategy: str) -> list[str]:
    """What the module is handed."""
    seen: list[Any] = []

    class Probe(Manual):
        def training_step(self, batch: list[Tensor], index: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            params = {id(param) for group in optimizer.param_groups for param in group["params"]}  # type: ignore
            assert params == {id(param) for param in self.parameters()}
            seen.append((type(self.trainer.model), isinstance(optimizer, MultiLossOptimizer)))

    trainer_on_rank(make_strategy(strategy), max_steps=-1, limit_train_batches=1, max_epochs=1).fit(
        Probe(), loader(PER_RANK)
    )
    assert seen == [(MultiLossEngine, True)]
    return ["fine"]


@pytest.mark.parametrize("strategy", [*NAMES, "instance"])
def test_the_module_gets_an_ordinary_optimizer(pair: Ranks, strategy: str) -> None:
    """A ``torch.optim.Optimizer`` with the module's parameters."""
    pair.run(kinds, strategy)


def low_precision(strategy: str, precision: str) -> tuple[Tensor, torch.dtype]:
    """Train in bf16."""
    model = Manual()
    before = model.state_dict()["net.trunk.0.weight"].clone()
    trainer_on_rank(make_strategy(strategy), precision=precision).fit(model, loader(PER_RANK))
    return (model.final["net.trunk.0.weight"].float() - before).abs().max(), model.final["offset"].dtype


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", NAMES[1:])
def test_bf16(pair: Ranks, strategy: str, precision: str) -> None:
    """Trains in bf16."""
    for moved, dtype in pair.run(low_precision, strategy, precision):
        assert moved > 0.01
        assert dtype == torch.bfloat16


class TwoOptimizers(Manual):
    """Not supported yet."""

    def configure_optimizers(self) -> Any:
        """Two."""
        return [torch.optim.SGD(head.parameters(), lr=0.1) for head in self.net.heads]


class NoOptimizer(Manual):
    """Nothing to shard."""

    def configure_optimizers(self) -> Any:
        """None."""


class SkipsAStep(Automatic):
    """Returns nothing."""

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        """Nothing."""


BAD_FITS: dict[str, tuple[type[Base], dict[str, Any], str]] = {
    "two optimizers": (TwoOptimizers, {}, "`configure_optimizers` returned 2 optimizers"),
    "no optimizer": (NoOptimizer, {}, "`configure_optimizers` returned None"),
    "skipped step": (SkipsAStep, {}, "`training_step` by returning None"),  # Lightning's own
}


def bad_fit(name: str, strategy: str) -> str:
    """The message."""
    module, kwargs, _ = BAD_FITS[name]
    try:
        fit(module, strategy, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", BAD_FITS)
def test_bad_fits_raise_on_every_rank(pair: Ranks, name: str) -> None:
    """With what was got and what to do."""
    for strategy in ("deepspeed_multiloss_stage_1", "deepspeed_multiloss_stage_3"):
        for message in pair.run(bad_fit, name, strategy):
            assert BAD_FITS[name][2] in message


def test_registered_names() -> None:
    """All names of the documentation, and the stock ones are still stock."""
    names = {name for name in StrategyRegistry.available_strategies() if "multiloss" in name}
    assert names == {*NAMES, "deepspeed_multiloss_stage_2_offload", "deepspeed_multiloss_stage_3_offload"}
    assert StrategyRegistry.get("deepspeed_multiloss").config["zero_optimization"]["stage"] == 2
    assert not isinstance(StrategyRegistry.get("deepspeed_stage_2"), DeepSpeedMultiLossStrategy)


def test_foreign_precision_plugins_are_refused() -> None:
    """They would not route backwards to the engine."""
    with pytest.raises(MisconfigurationException, match="precision plugin Precision"):
        DeepSpeedMultiLossStrategy(precision_plugin=Precision())


@pytest.mark.parametrize("strategy", ["deepspeed_multiloss_stage_2_offload", "deepspeed_multiloss_stage_3_offload"])
def test_offload_by_name(pair: Ranks, strategy: str) -> None:
    """With an ordinary torch optimizer."""
    expected, *_ = fit_plain(Manual, 2)
    for weights, *_ in pair.run(fit_with, Manual, strategy, {}):
        assert_weights(weights, expected)
