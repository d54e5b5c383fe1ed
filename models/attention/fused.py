"""Disentangled attention in Triton kernels: exact, without a matrix of all pairs, forward and backward.

The function is `disentangled.eager_attention`. Both position terms are first multiplied out by slot, for
some heads at a time so that the products stay in the cache, and each pair of tokens looks its two numbers up;
where all distances of a tile share a slot, nothing is looked up. Backward writes the gradients of the scores
that are in the band of distances told apart by distance, each to a place of its own, and sums the others; two
matrix products make the tables' gradients of it. Nothing is added atomically, so results repeat.

Sequences are packed: the tokens of all of them in a row, and where each begins.

T tokens of all sequences, S sequences, L tokens of the longest, H heads, D head width, R rows of the position
tables; h heads that are computed together, W columns of gradients by distance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .dropout import draw_seed
from .slots import SlotTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)
"""The oldest compute capability: before it Triton multiplies without tensor cores."""
MAX_WIDTH = 128
"""The widest head that has blocks."""
TABLE_BYTES = 32 << 20
"""Heads are computed together whose numbers by slot and by distance take no more: so they stay in cache."""
ALIGNED = 8
"""Rows of gradients by distance are a multiple of this long, for the matrix products after them."""


@dataclass(frozen=True)
class Blocks:
    """How a kernel is launched.

    Args:
        queries, keys: of a tile, powers of 2 and at least 16.
        warps, stages: Triton's `num_warps` and `num_stages`.
    """

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD: dict[tuple[int, int], Blocks] = {
    (16, 2): Blocks(128, 32, 8, 2),
    (32, 2): Blocks(128, 32, 8, 2),
    (64, 2): Blocks(128, 32, 8, 2),
    (128, 2): Blocks(64, 32, 8, 2),
    (16, 4): Blocks(64, 32, 4, 1),
    (32, 4): Blocks(64, 32, 4, 1),
    (64, 4): Blocks(32, 32, 8, 1),
    (128, 4): Blocks(16, 32, 8, 1),
}
"""By head width, rounded up, and bytes of a number: what compiles with few registers spilt, and into the
shared memory of every device of `CAPABILITY` or newer. `benchmarks/attention_cuda.py --tune` times others."""
BACKWARD: dict[tuple[int, int], Blocks] = {
    (16, 2): Blocks(64, 32, 4, 1),
    (32, 2): Blocks(64, 32, 4, 1),
    (64, 2): Blocks(64, 32, 4, 1),
    (128, 2): Blocks(32, 32, 4, 1),
    (16, 4): Blocks(32, 32, 4, 1),
    (32, 4): Blocks(32, 32, 4, 1),
    (64, 4): Blocks(32, 32, 8, 1),
    (128, 4): Blocks(16, 32, 8, 1),
}
"""As `FORWARD`, for both kernels of backward."""


def is_interpreted() -> bool:
    """Whether Triton is told to run kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def missing(width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """What these kernels lack to run for heads of a width and a dtype on a device; None where they can."""
    if not _triton_is_installed():
        return "the package triton is not installed (`pip install triton`; torch's builds for CUDA bring it)"
    if device.type != "cuda" and not is_interpreted():
        return f"it runs on CUDA devices, not on {device.type}, unless TRITON_INTERPRET=1 is set"
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            has, needs = (".".join(map(str, x)) for x in (capability, CAPABILITY))
            return f"it needs compute capability {needs}, and the device has {has}"
    if width > MAX_WIDTH:
        return f"heads are {width} wide, and it has blocks up to {MAX_WIDTH}"
    if dtype not in DTYPES:
        return f"it computes in {', '.join(str(x).removeprefix('torch.') for x in DTYPES)}, not in {dtype}"
    return None


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    slots: SlotTable,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Disentangled attention, by Triton kernels; arguments as `blockwise.blockwise_attention`.

    Args:
        query, key, value: [B, H, L, D], float32, bfloat16 or float16.
        slots: of L tokens, or of the longest sequence of a row or a longer one.
        mask: boolean [B, L] or None.
        cu_seqlens: of sequences end to end, [1, H, T, D], that attend within themselves: where each begins,
            and T; integers [S + 1].

    Returns:
        context [B, L, H, D].

    Raises:
        ValueError: a mask [B, L, L], or the kernels cannot run; the message says what is missing.
    """
    batch, _, length, width = query.shape
    device = query.device
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; the Triton kernels take [B, L] alone"
        )
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else key.dtype
    obstacle = missing(width, dtype, device)
    if obstacle is not None:
        raise ValueError(f"the Triton kernels cannot run: {obstacle}")
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (batch + 1) * length, length, device=device)
    content = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))
    tables = (None if x is None else x.to(dtype) for x in (pos_key, pos_query))
    # Where all distances have one slot, it is both the first and the last.
    low, high = (x - (slots.length - 1) for x in (slots.low, max(slots.high, slots.low)))
    context, _ = attention(
        *content,
        *tables,
        slots.by_distance.to(torch.int32),
        cu_seqlens.to(torch.int32),
        None if mask is None else mask.flatten(),
        slots.length,
        low,
        high,
        scale,
        dropout,
        draw_seed() if dropout > 0 else 0,
    )
    return context.unflatten(0, (batch, length))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Call:
    """The arguments of `attention`, and what its kernels are given.

    Args:
        query, key, value: [T, H, D], of one dtype.
        pos_key, pos_query: projected position tables [H, R, D], of it too, or None where the term is off.
        by_distance: int32 [2 * length - 1], the slots of the distances 1 - length to length - 1.
        starts: int32 [S + 1].
        mask: boolean [T], or None: padding keys are hidden, and a padding query attends uniformly.
        length: no sequence is longer.
        low, high: distances before `low` read slot 0, those from `high` on slot R - 1.
        scale, dropout: as `triton_attention`.
        seed: of dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    by_distance: Tensor
    starts: Tensor
    mask: Tensor | None
    length: int
    low: int
    high: int
    scale: float
    dropout: float
    seed: int

    @property
    def tables(self) -> list[Tensor]:
        return [x for x in (self.pos_key, self.pos_query) if x is not None]

    @property
    def rows(self) -> int:
        """R, 0 where both terms are off."""
        return self.tables[0].shape[1] if self.tables else 0

    def groups(self, columns: int = 0) -> Iterator[slice]:
        """Heads that are computed together, where each token has `columns` gradients by distance."""
        tokens, heads, _ = self.query.shape
        numbers = tokens * (len(self.tables) * self.rows + columns)
        together = max(TABLE_BYTES // max(numbers * self.query.element_size(), 1), 1)
        return (slice(h, min(h + together, heads)) for h in range(0, heads, together))

    def of_heads(self, heads: slice) -> Call:
        """The part of some heads."""
        return replace(
            self,
            query=_rows(self.query[:, heads]),
            key=_rows(self.key[:, heads]),
            value=_rows(self.value[:, heads]),
            pos_key=None if self.pos_key is None else self.pos_key[heads],
            pos_query=None if self.pos_query is None else self.pos_query[heads],
            seed=self.seed + heads.start,
        )

    def by_slot(self) -> tuple[Tensor, Tensor]:
        """Both position terms by slot, [h, T, R]; anything where a term is off."""
        return (
            self.query if self.pos_key is None else self._times(self.query, self.pos_key),
            self.key if self.pos_query is None else self._times(self.key, self.pos_query),
        )

    def _times(self, x: Tensor, table: Tensor) -> Tensor:
        return _product(x.transpose(0, 1), table.transpose(1, 2), self.scale)

    def columns(self) -> Tensor:
        """Which slot each column of the gradients by distance is of, [W].

        The first slot, the band, the last slot, and what makes the number a round one, where all is zero.
        """
        middle = self.length - 1
        band = self.by_distance[self.low + middle : self.high + middle]
        ends = band.new_zeros(1), band.new_full((1,), self.rows - 1)
        filling = band.new_zeros(-(len(band) + 2) % ALIGNED)
        return torch.cat((ends[0], band, ends[1], filling)).long()

    def launch(self, kernel: str, blocks: Blocks, size: int, *arguments: Any) -> None:
        """Run a kernel each of whose programs has `size` queries or keys."""
        from . import kernels

        width, precise = self.query.shape[-1], torch.get_float32_matmul_precision() == "highest"
        grid = (-(-self.length // size), len(self.starts) - 1, self.query.shape[1])
        with torch.cuda.device_of(self.query):
            getattr(kernels, kernel)[grid](
                *arguments,
                self.length,
                self.low,
                self.high,
                1 / self.scale,
                self.dropout,
                self.seed,
                C2P=self.pos_key is not None,
                P2C=self.pos_query is not None,
                MASKED=self.mask is not None,
                DROPOUT=self.dropout > 0,
                PRECISION="ieee" if precise else "tf32",
                WIDTH=width,
                PADDED=padded(width),
                M=blocks.queries,
                N=blocks.keys,
                num_warps=blocks.warps,
                num_stages=blocks.stages,
            )


def forward(whole: Call) -> tuple[Tensor, Tensor]:
    """The context [T, H, D], and the logarithms of the softmax's sums, float32 [H, T]."""
    tokens, heads, width = whole.query.shape
    blocks = FORWARD[padded(width), whole.query.element_size()]
    context = whole.query.new_empty(tokens, heads, width)
    lse = whole.query.new_empty(heads, tokens, dtype=torch.float32)
    real = whole.starts if whole.mask is None else whole.mask.to(torch.uint8)
    for group in whole.groups():
        call, part = whole.of_heads(group), context[:, group]
        content = call.query, call.key, call.value
        call.launch(
            "forward", blocks, blocks.queries,
            *content, *call.by_slot(), call.by_distance, call.starts, real, part, lse[group],
            *_strides(*content, part), tokens, heads, call.rows,
        )  # fmt: skip
    return context, lse


def gradients(whole: Call, grad: Tensor, context: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value [T, H, D], and of both tables [H, R, D], empty where a term is off."""
    tokens, heads, width = whole.query.shape
    blocks = BACKWARD[padded(width), whole.query.element_size()]
    real = whole.starts if whole.mask is None else whole.mask.to(torch.uint8)
    columns = whole.columns() if whole.tables else whole.starts[:0]
    of_groups = []
    for group in whole.groups(len(columns)):
        call, together = whole.of_heads(group), group.stop - group.start
        content = call.query, call.key, call.value
        by_slot = call.by_slot()
        d_context, part = _rows(grad[:, group]), context[:, group]
        sums = call.query.new_empty(together, tokens, dtype=torch.float32)
        d_query, d_key, d_value = (call.query.new_empty(together, tokens, width) for _ in range(3))
        shared = call.by_distance, call.starts, real
        numbers = tokens, heads, call.rows, len(columns)
        bands = None if call.pos_key is None else d_query.new_zeros(together, tokens, len(columns))
        call.launch(
            "backward_of_queries", blocks, blocks.queries,
            *content, *by_slot, *shared, part, lse[group], d_context, sums,
            d_query, d_query if bands is None else bands,
            *_strides(*content, part, d_context), *numbers,
        )  # fmt: skip
        d_query, d_pos_key = _with_positions(d_query, bands, call.query, call.pos_key, columns, call.scale)
        bands = None if call.pos_query is None else d_query.new_zeros(together, tokens, len(columns))
        call.launch(
            "backward_of_keys", blocks, blocks.keys,
            *content, *by_slot, *shared, lse[group], d_context, sums,
            d_key, d_value, d_key if bands is None else bands,
            *_strides(*content, d_context), *numbers,
        )  # fmt: skip
        d_key, d_pos_query = _with_positions(d_key, bands, call.key, call.pos_query, columns, call.scale)
        of_groups.append((d_query, d_key, d_value, d_pos_key, d_pos_query))
    d_query, d_key, d_value, *d_tables = (torch.cat(x) for x in zip(*of_groups, strict=True))
    return *(x.transpose(0, 1).contiguous() for x in (d_query, d_key, d_value)), *d_tables


def _with_positions(
    d_content: Tensor,
    bands: Tensor | None,
    content: Tensor,
    table: Tensor | None,
    columns: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of queries or keys with that by position added, [h, T, D]; and of the table, [h, R, D].

    Args:
        d_content: the gradient by content, [h, T, D].
        bands: gradients of the scores by distance, [h, T, W], or None where the term is off.
        content: the queries or keys, [T, h, D].
        table: the position table that they meet, [h, R, D].
        columns: the slot of each distance, [W].
    """
    if bands is None or table is None:
        return d_content, d_content.new_empty(len(d_content), 0, d_content.shape[-1])
    d_content = torch.baddbmm(d_content, bands, table[:, columns], alpha=1 / scale)
    of_columns = _product(bands.transpose(1, 2), content.transpose(0, 1), scale)  # [h, W, D]
    # A product adds the columns of a slot up in an order of its own, which `index_add` on CUDA does not.
    slot = torch.arange(table.shape[1], device=columns.device)
    return d_content, (slot[:, None] == columns).to(table.dtype) @ of_columns


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """a b / scale, [h, m, n]; divided before it is rounded, to stay in range where the result does."""
    return torch.baddbmm(a.new_zeros(1, 1, 1), a, b, beta=0, alpha=1 / scale)


def _rows(x: Tensor) -> Tensor:
    """A tensor [T, h, D] whose rows are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """How far apart tokens and heads are in each."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def padded(width: int) -> int:
    """A head width as the kernels see it: a power of 2, and at least 16."""
    return max(16, 1 << (width - 1).bit_length())


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? pos_key, Tensor? pos_query, Tensor by_distance, "
    "Tensor starts, Tensor? mask, SymInt length, SymInt low, SymInt high, float scale, float dropout, "
    "SymInt seed"
)
_FORWARD = f"({_ARGUMENTS}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor grad, Tensor context, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("outplace::disentangled_attention", mutates_args=(), schema=_FORWARD)
def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward` of a `Call` of these arguments, as an operator of torch."""
    return forward(Call(*arguments))


@torch.library.custom_op("outplace::disentangled_attention_backward", mutates_args=(), schema=_BACKWARD)
def attention_backward(grad: Tensor, context: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """`gradients` of a `Call` of these arguments, as an operator of torch."""
    return gradients(Call(*arguments), grad, context, lse)


@attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@attention_backward.register_fake
def _(grad: Tensor, context: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, *tables = arguments[:5]
    content = (x.new_empty(x.shape) for x in (query, key, value))
    empty = query.shape[1], 0, query.shape[2]
    return *content, *(query.new_empty(empty if x is None else x.shape) for x in tables)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.numbers = inputs[8:]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing recomputes them
    found = attention_backward(grad, *saved, *ctx.numbers)
    tables = saved[5:7]
    of_tables = (None if x is None else d for x, d in zip(tables, found[3:], strict=True))
    return *found[:3], *of_tables, *(None,) * (3 + len(ctx.numbers))


attention.register_autograd(_backward, setup_context=_setup_context)
