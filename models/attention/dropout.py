"""Dropout that can be drawn again: what is recomputed, or masked in backward, loses the same entries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from . import runs_plainly

LEVELS = 1 << 15
"""Random numbers have 15 bits; the probability of keeping an entry is rounded to as many."""
COLUMNS = 1024
"""Of the matrix of random words that a mask is taken from."""


def draw_seed() -> int:
    """A seed from torch's own generator, which `torch.manual_seed` and checkpointing set."""
    return int(torch.randint(1 << 62, ()))


class Noise:
    """A sequence of masks, the same one whenever it is made of the same seed.

    The rows and the columns of a matrix have a hash each, of a counter. A word of it mixes the two of its
    place, and its halves are the random numbers of two entries. That takes a fraction of the time of torch's
    generator, which draws one after the other.

    Args:
        dropout: probability of dropping an entry.
        seed: 62 bits.
    """

    def __init__(self, dropout: float, seed: int) -> None:
        self.threshold = max(round((1 - dropout) * LEVELS), 1)
        self.share = self.threshold / LEVELS
        """The probability of keeping an entry, by which what is kept is divided."""
        # The golden ratio in 64 bits (Knuth's multiplicative hash): near seeds begin far apart.
        self.start, self.variant = divmod(seed * 0x9E3779B97F4A7C15 % (1 << 64), 1 << 32)

    def keep_mask(self, like: Tensor) -> Tensor:
        """The next mask: 1 where an entry is kept and 0 where it is dropped, of `like`'s shape and dtype."""
        words = (like.numel() + 1) // 2
        columns = max(min(words, COLUMNS), 1)
        rows = -(-words // columns)
        counter = torch.arange(rows + columns, dtype=torch.int32, device=like.device)
        hashes = _hash(counter + _int32(self.start), self.variant)
        self.start = self.start + rows + columns
        x = (hashes[:rows, None] ^ hashes[rows:]) * 0x21F0AAAD
        x = (x + (x >> 15)) * _int32(0xD35A2D97)
        number = x.view(torch.int16).flatten()[: like.numel()] & (LEVELS - 1)
        # The sign of the difference, as the number 1.
        kept = (number - self.threshold >> 15) & 1
        return kept.view(like.shape).to(like.dtype)


def _hash(x: Tensor, seed: int) -> Tensor:
    """Mix the bits of 32-bit integers; the constants are of https://github.com/skeeto/hash-prospector."""
    return _shifted(_shifted(_shifted(x, 16) * 0x21F0AAAD + _int32(seed), 15) * _int32(0xD35A2D97), 15)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x xor x >> bits. Torch repeats the sign when it shifts, so what comes in from the left is cut off."""
    return x ^ ((x >> bits) & ((1 << (32 - bits)) - 1))


def _int32(x: int) -> int:
    """The last 32 bits of x, signed."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def drop(dropout: nn.Module, x: Tensor) -> Tensor:
    """Return `dropout(x)`. On a CPU, keep a seed for the backward pass instead of torch's mask.

    Torch's mask is as large as `x` on a CPU; elsewhere it has a byte an entry and is drawn in one kernel.
    A module that is not torch's `Dropout`, or that has hooks, is called as it is.
    """
    if type(dropout) is not nn.Dropout or dropout._forward_hooks or dropout._forward_pre_hooks:
        return dropout(x)  # type: ignore[no-any-return]
    p = dropout.p
    if not dropout.training or not 0 < p < 1:
        return F.dropout(x, p, dropout.training)
    if x.device.type != "cpu" or not runs_plainly(x.device):
        return F.dropout(x, p)
    dropped: Tensor = DrawnAgain.apply(x, p, draw_seed())
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


@contextmanager
def kept_by_seed(dropped: Tensor, source: Tensor) -> Iterator[None]:
    """Where backward would keep `dropped`, it keeps `source`, of which `drop` made it, and draws again.

    For a source that others keep too. Without a gradient, or where torch's own dropout was taken, nothing
    changes.
    """
    if not isinstance(dropped.grad_fn, DrawnAgain._backward_cls):
        yield
        return
    node: Any = dropped.grad_fn
    storage = dropped.untyped_storage()._cdata

    def pack(saved: Tensor) -> Any:
        is_dropped = saved.untyped_storage()._cdata == storage
        return (saved.shape, saved.stride(), saved.storage_offset()) if is_dropped else saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        again: Tensor = DrawnAgain.apply(source.detach(), node.dropout, node.seed)
        return again.as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        yield
