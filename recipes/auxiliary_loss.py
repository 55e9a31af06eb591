"""Auxiliary losses on a shared trunk, back-propagated one by one under DeepSpeed ZeRO.

A small convolutional trunk looks at scikit-learn's handwritten digits (8x8 pixels, shipped with scikit-learn). Three
heads share its features: which digit it is, whether the digit is odd, and what the image looked like. Each head has its
own loss, and `training_step` back-propagates the three separately through the one forward. The test accuracy is over
95 % after about a minute on two CPU cores. The logs and a picture of the curves go to `runs/auxiliary_loss/version_*`.

    python recipes/auxiliary_loss.py                                 # one device, ZeRO stage 2
    python recipes/auxiliary_loss.py --devices 2 --stage 3           # parameters sharded over two devices
    python recipes/auxiliary_loss.py --devices 2 --accelerator cpu   # two CPU processes, also where there is a GPU
    python recipes/auxiliary_loss.py --check                         # compare with one backward of the sum
    python recipes/auxiliary_loss.py --strategy ddp --summed         # PyTorch's DDP instead of DeepSpeed

DDP takes the three backwards only as `--strategy ddp_find_unused_parameters_true`, because no loss reaches all heads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import deepspeed
import matplotlib
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

import multiloss  # noqa: F401  # registers the strategies

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

# Hyper-parameters. The batch size is that of all devices together, so their number does not change the steps.
BATCH_SIZE = 32
MAX_EPOCHS = 12
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 0.01
CHANNELS = 32
FEATURES = 48  # fewer than the image's 64 pixels: reconstruction has to compress
PARITY_WEIGHT = 1.0
RECONSTRUCTION_WEIGHT = 10.0
HELD_OUT = 360  # images for validation, and as many for the test; even, so that two devices need no padding


class MultiHeadDigits(LightningModule):
    """A trunk with one classification head and two auxiliary heads."""

    def __init__(self, summed: bool) -> None:
        """Build the network and its metrics; with `summed`, one backward replaces the three."""
        super().__init__()
        self.automatic_optimization = False
        self.summed = summed
        self.weights: dict[str, Tensor] = {}  # filled at the end of training
        # GELU is smooth. A ReLU that a rounding error switches on or off would dominate what `--check` measures.
        self.trunk = nn.Sequential(
            nn.Conv2d(1, CHANNELS, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(2 * CHANNELS * 4 * 4, FEATURES),
            nn.GELU(),
        )
        self.digit_head = nn.Linear(FEATURES, 10)
        self.parity_head = nn.Linear(FEATURES, 1)
        self.reconstruction_head = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 64))
        # One metric for each split, as modules: Lightning moves them to the device and syncs them over the ranks.
        self.metrics = nn.ModuleDict()
        for split in ("train", "val", "test"):
            self.metrics[f"{split}_digit_accuracy"] = MulticlassAccuracy(num_classes=10, average="micro")
            self.metrics[f"{split}_parity_accuracy"] = BinaryAccuracy()
            self.metrics[f"{split}_reconstruction_rmse"] = MeanSquaredError(squared=False)

    def setup(self, stage: str) -> None:
        """A model this small gains nothing from more threads, and on busy cores they wait for each other."""
        torch.set_num_threads(1)  # here, as Lightning sets its own number before this hook

    def compute_losses(self, batch: list[Tensor], split: str) -> tuple[Tensor, Tensor, Tensor]:
        """One forward through the trunk, three losses; logs them and the heads' metrics over the epoch."""
        images, digits = batch
        odd = digits % 2
        features = self.trunk(images)
        digit_logits = self.digit_head(features)
        odd_logits = self.parity_head(features).squeeze(1)
        reconstruction = self.reconstruction_head(features).view_as(images)

        losses = {
            "digit": nn.functional.cross_entropy(digit_logits, digits),
            "parity": nn.functional.binary_cross_entropy_with_logits(odd_logits, odd.float()),
            "reconstruction": nn.functional.mse_loss(reconstruction, images),
        }
        logged = {f"{split}_{name}_loss": loss for name, loss in losses.items()}
        self.log_dict(logged, on_step=False, on_epoch=True, sync_dist=True)
        measured = {
            f"{split}_digit_accuracy": (digit_logits, digits),
            f"{split}_parity_accuracy": (odd_logits, odd),
            f"{split}_reconstruction_rmse": (reconstruction, images),
        }
        for key, (output, target) in measured.items():
            metric = cast(Metric, self.metrics[key])
            metric.update(output.detach(), target)
            self.log(key, metric, on_step=False, on_epoch=True, prog_bar=True)
        return losses["digit"], PARITY_WEIGHT * losses["parity"], RECONSTRUCTION_WEIGHT * losses["reconstruction"]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Three backwards, one step."""
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        digit_loss, parity_loss, reconstruction_loss = self.compute_losses(batch, "train")
        optimizer.zero_grad()
        if self.summed:
            self.manual_backward(digit_loss + parity_loss + reconstruction_loss)
        else:
            # Each adds to the trunk's gradients. All but the last keep the graph for the next.
            self.manual_backward(digit_loss, retain_graph=True)
            self.manual_backward(parity_loss, retain_graph=True)
            self.manual_backward(reconstruction_loss)
        optimizer.step()
        scheduler.step()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The same losses and metrics on held-out images."""
        self.compute_losses(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """The same losses and metrics on the test images."""
        self.compute_losses(batch, "test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One optimizer for all parameters, and a scheduler that `training_step` steps after each batch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [scheduler]

    def on_train_end(self) -> None:
        """Keep a copy of the weights. ZeRO stage 3 has shards only, which all ranks gather together."""
        sharded = [param for param in self.parameters() if hasattr(param, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
            self.weights = {name: param.detach().cpu().clone() for name, param in self.named_parameters()}


def load_data(batch_size: int, seed: int) -> list[DataLoader[Any]]:
    """The loaders of the training, the validation and the test images, in this order."""
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16  # pixels are 0 to 16
    y = torch.tensor(digits)
    # The split's seed is fixed: runs with different seeds are tested on the same images.
    rest, test = train_test_split(range(len(y)), test_size=HELD_OUT, stratify=y, random_state=0)
    train, val = train_test_split(rest, test_size=HELD_OUT, stratify=y[rest], random_state=0)
    shuffle = torch.Generator().manual_seed(seed)
    return [
        DataLoader(TensorDataset(x[train], y[train]), batch_size=batch_size, shuffle=True, generator=shuffle),
        DataLoader(TensorDataset(x[val], y[val]), batch_size=batch_size),
        DataLoader(TensorDataset(x[test], y[test]), batch_size=batch_size),
    ]


def train(args: argparse.Namespace, summed: bool) -> MultiHeadDigits:
    """Train from the seed, plot and test. Returns the trained module."""
    seed_everything(args.seed)
    strategy = f"{args.strategy}_stage_{args.stage}" if args.strategy == "deepspeed_multiloss" else args.strategy
    logger = CSVLogger(args.output, name=None)
    trainer = Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.max_epochs,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
    )
    logger.log_hyperparams({**vars(args), "strategy": strategy, "summed": summed})
    train_loader, val_loader, test_loader = load_data(max(1, BATCH_SIZE // trainer.world_size), args.seed)
    module = MultiHeadDigits(summed)
    trainer.fit(module, train_loader, val_loader)
    (result,) = trainer.test(module, test_loader, verbose=False)
    if trainer.is_global_zero:
        title = f"{strategy}, {trainer.world_size} device(s), {'one summed backward' if summed else 'three backwards'}"
        print(f"{title}: curves in {plot_curves(Path(logger.log_dir), title)}")
        print(", ".join(f"{name} {value:.4f}" for name, value in result.items()))
    return module


def plot_curves(log_dir: Path, title: str) -> Path:
    """Draw the losses and the metrics of each epoch, from the CSV file in the log folder, and return the picture."""
    table = np.genfromtxt(log_dir / "metrics.csv", delimiter=",", names=True)  # what a row lacks is NaN
    losses = ["digit_loss", "parity_loss", "reconstruction_loss"]
    metrics = ["digit_accuracy", "parity_accuracy", "reconstruction_rmse"]
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), sharex=True, layout="constrained")
    for axis, name in zip(axes.flat, losses + metrics, strict=True):
        for split, label in (("train", "train"), ("val", "held out")):
            rows = table[~np.isnan(table[f"{split}_{name}"])]
            axis.plot(rows["epoch"] + 1, rows[f"{split}_{name}"], marker=".", label=label)
        axis.set_title(name.replace("_", " ").replace("rmse", "RMSE"))
        if name in losses:
            axis.set_yscale("log")
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    figure.suptitle(title)
    figure.supxlabel("epoch")
    path = log_dir / "curves.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main() -> None:
    """Parse the options, train, and compare with the other way to back-propagate if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="deepspeed_multiloss", help="any Lightning strategy")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage of deepspeed_multiloss")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, default=MAX_EPOCHS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--summed", action="store_true", help="one backward of the sum instead of three backwards")
    parser.add_argument("--check", action="store_true", help="train both ways and print how far the weights differ")
    parser.add_argument("--output", default="runs/auxiliary_loss")
    args = parser.parse_args()

    module = train(args, args.summed)
    if args.check:
        other = train(args, not args.summed)
        differences = [(module.weights[name] - weight).abs().max().item() for name, weight in other.weights.items()]
        if module.global_rank == 0:
            print(f"largest weight difference between three backwards and one of the sum: {max(differences):.2e}")


if __name__ == "__main__":
    main()
