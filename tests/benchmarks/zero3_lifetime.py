"""Elements gathered, held and reduced per step in ZeRO-3 for K losses, beside stock DeepSpeed with the summed loss.

A 16-layer network with one head per loss, two ranks, no persistent parameters, every parameter released as soon as its
module is done, no prefetching. One step is one forward, K backwards (stock: one, of the sum) and the optimizer's step.

    python -m tests.benchmarks.zero3_lifetime
"""

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

import multiloss
from tests.counters import Counts, counting
from tests.ranks import Ranks

LAYERS = 16
WIDTH = 64
LOSSES = (1, 2, 4, 8)
SYSTEMS = ("stock, summed", "multiloss, separate", "multiloss, summed")

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 20_000,
    },
}


class Network(nn.Module):
    """A deep trunk and ``heads`` small heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.trunk = nn.Sequential(*blocks)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(heads))

    def forward(self, x: Tensor) -> list[Tensor]:
        """One loss per head."""
        features = self.trunk(x)
        return [head(features).square().mean() for head in self.heads]


def count(system: str, heads: int, zero: dict[str, Any] | None = None) -> tuple[Counts, int]:
    """On a rank: the counts of the third step, and the size of the model."""
    model = Network(heads)
    size = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **(zero or {})}}
    build = deepspeed.initialize if system.startswith("stock") else multiloss.initialize
    engine, *_ = build(model=model, optimizer=optimizer, config=config)
    try:
        for step in range(3):  # the second step records what the third one follows
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            with counting(model) as counts:
                losses = engine(inputs)
                if system.endswith("summed"):
                    engine.backward(torch.stack(losses).sum())
                else:
                    for loss in losses[:-1]:
                        engine.backward(loss, retain_graph=True)
                    engine.backward(losses[-1])
                engine.step()
        return counts, size
    finally:
        engine.destroy()


def table(pool: Ranks) -> str:
    """In Markdown, relative to the size of the model."""
    lines = [
        "| losses | system | peak gathered | gathered per step | reduced per step |",
        "|---|---|---|---|---|",
    ]
    for heads in LOSSES:
        for system in SYSTEMS:
            counts, size = pool.run(count, system, heads)[0]
            lines.append(
                f"| {heads} | {system} | {counts.peak} ({counts.peak / size:.1%}) | {counts.gathered}"
                f" ({counts.gathered / size:.2f} models) | {counts.reduced} ({counts.reduced / size:.2f} models) |"
            )
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
