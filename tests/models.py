"""Small networks with a shared trunk and several heads."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FEATURES = 6
WIDTH = 10


class Fuse(nn.Module):
    """Passes its input on; when it is armed, a backward that comes through raises."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        if x.requires_grad:
            x.register_hook(self._blow)
        return x

    def _blow(self, grad: Tensor) -> None:
        if self.armed:
            raise ArithmeticError("the fuse blew")


class MultiHead(nn.Module):
    """A trunk, a parameter of the root module itself, and one head per loss."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.fuse = Fuse()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), self.fuse, nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(heads))

    def features(self, x: Tensor) -> Tensor:
        """What all heads share."""
        features: Tensor = self.trunk(x) * self.gain
        return features

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One output per head."""
        features = self.features(x)
        return tuple(head(features) for head in self.heads)


class Tied(MultiHead):
    """Two modules that share one weight."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.again = nn.Linear(WIDTH, WIDTH)
        tied: Any = self.trunk[3]
        self.again.weight = tied.weight

    def features(self, x: Tensor) -> Tensor:
        """The tied weight is used twice."""
        return torch.tanh(self.again(super().features(x)))


class Repeated(MultiHead):
    """A submodule that is called three times."""

    @property
    def last(self) -> nn.Module:
        """The trunk's last layer."""
        return self.trunk[3]

    def features(self, x: Tensor) -> Tensor:
        """The last trunk layer, three times."""
        features: Tensor = super().features(x)
        for _ in range(2):
            features = torch.tanh(self.last(features))
        return features


class Checkpointed(MultiHead):
    """A trunk under activation checkpointing."""

    use_reentrant = False

    def features(self, x: Tensor) -> Tensor:
        """Recomputed in the backward."""
        inputs = self.trunk[0](x)
        hidden: Tensor = checkpoint(self.trunk[1:], inputs, use_reentrant=self.use_reentrant)
        return hidden * self.gain


class Frozen(MultiHead):
    """A frozen block between trunk and heads, and a frozen first layer."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)
        self.trunk[0].requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        """Gradients pass through the frozen block."""
        return torch.tanh(self.fixed(super().features(x)))


class Deep(MultiHead):
    """Blocks with two inputs and two outputs, as recurrent or reversible networks have."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.blocks = nn.ModuleList(_TwoStreams() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        """Both streams meet at the end."""
        left = right = super().features(x)
        for block in self.blocks:
            left, right = block(left, right)
        return left + right


class _TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left + torch.tanh(self.left(right)), right + torch.tanh(self.right(left))


def build(model: type[MultiHead], heads: int, **kwargs: Any) -> MultiHead:
    """The same initial weights every time."""
    torch.manual_seed(0)
    return model(heads, **kwargs)


def batch(key: int, rank: int) -> Tensor:
    """The inputs that ``rank`` sees at ``key``."""
    generator = torch.Generator().manual_seed(1000 * key + rank)
    return torch.randn(4, FEATURES, generator=generator)


def loss_of(output: Tensor, index: int) -> Tensor:
    """A loss of one head; the heads' losses differ in size."""
    return (output - 0.3 * index).square().mean() * (1.0 + 0.5 * index)
