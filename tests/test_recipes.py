"""The recipes run as their users run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run_recipe(name: str, *options: str) -> str:
    """In a process of its own, which launches its other ranks; what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(variable, None)
    command = [sys.executable, str(ROOT / "recipes" / name), *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def difference_in(output: str) -> float:
    """The number that ``--check`` prints."""
    (line,) = [line for line in output.splitlines() if "largest weight difference" in line]
    return float(line.split(":")[1].split()[0])


@pytest.mark.parametrize("stage", ["1", "3"])
def test_auxiliary_loss(stage: str, tmp_path: Path) -> None:
    """Two ranks launched by Lightning, both ways of back-propagating, a CSV log and a picture each.

    After two epochs the two ways differ by rounding, which AdamW amplifies: it divides by the root of second moments
    that are as small as rounding itself for weights that hardly matter.
    """
    output = run_recipe(
        "auxiliary_loss.py",
        *("--accelerator", "cpu", "--devices", "2", "--stage", stage),
        *("--max-epochs", "2", "--check", "--output", str(tmp_path)),
    )
    assert "test_digit_accuracy" in output
    assert difference_in(output) < 1e-2
    assert len(list(tmp_path.glob("version_*/metrics.csv"))) == 2
    assert len(list(tmp_path.glob("version_*/curves.png"))) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_auxiliary_loss_on_cuda(tmp_path: Path) -> None:
    """One GPU, ZeRO-3."""
    output = run_recipe(
        "auxiliary_loss.py",
        *("--accelerator", "cuda", "--stage", "3", "--max-epochs", "3", "--check", "--output", str(tmp_path)),
    )
    assert difference_in(output) < 1e-2
