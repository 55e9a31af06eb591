"""Time per training step in Lightning: multiloss beside stock DeepSpeed with the summed loss, in one run.

Two ranks, an 8-layer network, K losses. Every round runs each system once; the table shows each system's median over
all rounds, relative to stock's. Stock Lightning refuses DeepSpeed on the CPU; here it gets what makes it start there.

    python -m tests.benchmarks.step_time
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import deepspeed
import lightning as L  # noqa: N812  # as its documentation does
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from multiloss import DeepSpeedMultiLossStrategy
from tests.ranks import Ranks

LAYERS = 8
WIDTH = 256
BATCH = 64
STEPS = 30
WARM_UP = 6  # the first steps record ZeRO-3's trace
ROUNDS = 5
LOSSES = (2, 4)
STAGES = (1, 2, 3)
SYSTEMS = ("stock, summed", "multiloss, summed", "multiloss, separate")


class StockOnCPU(DeepSpeedStrategy):
    """Stock DeepSpeedStrategy, past its checks for CUDA."""

    def setup_environment(self) -> None:
        """Any accelerator."""
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Devices without indices."""
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        return deepspeed.initialize(config=self.config, model=model, optimizer=optimizer)[:2]


class Module(L.LightningModule):
    """One trunk, K heads; times its steps."""

    def __init__(self, losses: int, summed: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.summed = summed
        torch.manual_seed(0)
        blocks = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.trunk = nn.Sequential(*blocks)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(losses))
        self.times: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        """One backward per loss, or one for their sum."""
        optimizer = self.optimizers()
        features = self.trunk(batch[0])
        losses = [head(features).square().mean() for head in self.heads]
        if self.summed:
            losses = [torch.stack(losses).sum()]
        for loss in losses[:-1]:
            self.manual_backward(loss, retain_graph=True)
        self.manual_backward(losses[-1])
        optimizer.step()  # type: ignore[union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop it."""
        if batch_idx >= WARM_UP:
            self.times.append(time.perf_counter() - self._start)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def measure(system: str, stage: int, losses: int) -> list[float]:
    """On a rank: seconds of each step."""
    sizes: dict[str, Any] = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    strategy: DDPStrategy
    if system.startswith("stock"):
        strategy = StockOnCPU(stage=stage, overlap_comm=False, **sizes)
    else:
        strategy = DeepSpeedMultiLossStrategy(stage=stage, overlap_comm=False, **sizes)
    module = Module(losses, system.endswith("summed"))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[TorchElasticEnvironment()],
    )
    data = TensorDataset(torch.randn(torch.distributed.get_world_size() * STEPS * BATCH, WIDTH))
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return module.times


def table(pool: Ranks) -> str:
    """In Markdown."""
    lines = ["| stage | losses | " + " | ".join(SYSTEMS) + " |", "|---|---|" + "---|" * len(SYSTEMS)]
    for stage in STAGES:
        for losses in LOSSES:
            times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            for _ in range(ROUNDS):
                for system in SYSTEMS:
                    times[system] += pool.run(measure, system, stage, losses)[0]
            medians = {system: statistics.median(values) for system, values in times.items()}
            stock = medians[SYSTEMS[0]]
            cells = [f"{medians[system] / stock:.2f} ({1000 * medians[system]:.1f} ms)" for system in SYSTEMS]
            lines.append(f"| {stage} | {losses} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    pool = Ranks(2)
    try:
        print(table(pool))
    finally:
        pool.stop()


if __name__ == "__main__":
    main()
