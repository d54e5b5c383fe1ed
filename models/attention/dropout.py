"""Dropout that can be drawn again: what is recomputed, or masked in backward, loses the same entries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import runs_plainly

LEVELS = 1 << 16
"""Random numbers have 16 bits; the probability of keeping an entry is rounded to as many."""


def draw_seed() -> int:
    """A seed from torch's own generator, which `torch.manual_seed` and checkpointing set."""
    return int(torch.randint(1 << 62, ()))


class Noise:
    """A sequence of masks, the same one whenever it is made of the same seed.

    Entries are numbered, and each two numbers are the halves of a hash of a counter. That takes a fraction of
    the time of torch's generator, which draws one after the other.

    Args:
        dropout: probability of dropping an entry.
        seed: 62 bits.
    """

    def __init__(self, dropout: float, seed: int) -> None:
        kept = max(round((1 - dropout) * LEVELS), 1)
        self.threshold = kept - LEVELS // 2
        self.share = kept / LEVELS
        """The probability of keeping an entry, by which what is kept is divided."""
        self.seed, self.words = seed, 0

    def keep_mask(self, like: Tensor) -> Tensor:
        """The next mask: 1 where an entry is kept and 0 where it is dropped, of `like`'s shape and dtype."""
        words = (like.numel() + 1) // 2
        counter = torch.arange(words, dtype=torch.int32, device=like.device)
        x = _hash(counter + _int32(self.seed + self.words), self.seed >> 31)
        self.words = self.words + words
        number = torch.cat((x >> 16, (_shifted(x, 15) << 16) >> 16))[: like.numel()]
        # All bits where the number is below the threshold, and of them those of a 1 in float32.
        one = (number - self.threshold >> 31) & 0x3F800000
        return one.view(torch.float32).view(like.shape).to(like.dtype)


def _hash(x: Tensor, seed: int) -> Tensor:
    """Mix the bits of 32-bit integers; the constants are of https://github.com/skeeto/hash-prospector.

    Its last shift, which the upper half does not need, is left to the caller.
    """
    return _shifted(_shifted(x, 16) * 0x21F0AAAD + _int32(seed), 15) * _int32(0xD35A2D97)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x xor x >> bits. Torch repeats the sign when it shifts, so what comes in from the left is cut off."""
    return x ^ ((x >> bits) & ((1 << (32 - bits)) - 1))


def _int32(x: int) -> int:
    """The last 32 bits of x, signed."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


class Dropout(nn.Dropout):
    """Dropout that on a CPU keeps a seed for backward, where torch keeps a mask as large as its input.

    On other devices torch's mask has a byte an entry, and is drawn in one kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not 0 < self.p < 1:
            return F.dropout(x, self.p, self.training)
        if x.device.type != "cpu" or not runs_plainly(x.device):
            return F.dropout(x, self.p)
        dropped: Tensor = DrawnAgain.apply(x, self.p, draw_seed())
        return dropped


class DrawnAgain(torch.autograd.Function):
    """Dropout by `Noise`. It is linear, so its gradient is the same of the gradient."""

    @staticmethod
    def forward(x: Tensor, dropout: float, seed: int) -> Tensor:
        noise = Noise(dropout, seed)
        return x * noise.keep_mask(x) / noise.share

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dropout, ctx.seed = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return DrawnAgain.apply(grad, ctx.dropout, ctx.seed), None, None
