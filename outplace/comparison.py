"""What two libraries make of one checkpoint, and how far apart it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .models.layers import at_least_float32

SHOWN = 10
"""How many tokens, or names of parameters, are listed before the rest is only counted."""


@dataclass(frozen=True)
class Difference:
    """How far apart one output is.

    Args:
        name: `embeddings`, `layer 1` and so on for the hidden states, else the output's own.
        absolute: the largest difference; infinite where only one of the two values is finite.
        relative: that over the largest magnitude of upstream's values.
    """

    name: str
    absolute: float
    relative: float


def difference(name: str, ours: Tensor, upstream: Tensor) -> Difference:
    """Compare two tensors. Equal infinities, and NaN at the same place, are no difference.

    Raises:
        ValueError: they differ in shape.
    """
    if ours.shape != upstream.shape:
        raise ValueError(
            f"{name} has shape {tuple(ours.shape)} in outplace and {tuple(upstream.shape)} in transformers"
        )
    dtype = at_least_float32(upstream.dtype)
    a, b = ours.to(dtype), upstream.to(dtype)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    absolute = apart.max().item() if apart.numel() else 0.0
    finite = b[b.isfinite()]
    size = finite.abs().max().item() if finite.numel() else 0.0
    return Difference(name, absolute, absolute / (size or 1.0))


def real_values(output: Mapping[str, Any], mask: Tensor) -> dict[str, Tensor]:
    """The tensors of a model's output by name, on the CPU, only where tokens are real.

    Values at padding mean nothing, and the libraries may differ there.

    Args:
        output: a model's, with hidden states; attention weights may be among it.
        mask: boolean [B, L], False on padding.
    """
    mask = mask.cpu()
    pairs = mask[:, None, :, None] & mask[:, None, None, :]  # [B, 1, L, L]

    def kept(name: str, x: Tensor) -> Tensor:
        x = x.cpu()
        if x.ndim == 4:  # [B, H, L, L], attention
            return x[pairs.expand_as(x)]
        if x.ndim == 3 or name in ("start_logits", "end_logits"):  # [B, L, …], one for each token
            return x[mask]
        return x

    found = {}
    for i, states in enumerate(output["hidden_states"]):
        found[f"layer {i}" if i else "embeddings"] = kept("hidden_states", states)
    for i, weights in enumerate(output.get("attentions") or (), 1):
        found[f"attention {i}"] = kept("attentions", weights)
    for name, value in output.items():
        if isinstance(value, Tensor):
            found[name] = kept(name, value)
    return found


@dataclass(frozen=True)
class Token:
    id: int
    piece: str


@dataclass(frozen=True)
class TokenDifference:
    """A place where two tokenizers differ, texts and places counted from 0; None is past a row's end."""

    text: int
    position: int
    outplace: Token | None
    transformers: Token | None


@dataclass(frozen=True)
class Tokens:
    """How two tokenizers compare: places compared, how many differ, and the first of those."""

    compared: int
    differing: int
    first: list[TokenDifference]


def compare_tokens(
    ours: Sequence[Sequence[int]], upstream: Sequence[Sequence[int]], our_tokenizer: Any, its_tokenizer: Any
) -> Tokens:
    """Compare rows of token numbers place by place."""

    def named(number: int | None, tokenizer: Any) -> Token | None:
        return None if number is None else Token(number, tokenizer.convert_ids_to_tokens([number])[0])

    pairs = [
        (text, position, a, b)
        for text, rows in enumerate(zip(ours, upstream, strict=True))
        for position, (a, b) in enumerate(zip_longest(*rows))
    ]
    differing = [place for place in pairs if place[2] != place[3]]
    first = [
        TokenDifference(text, position, named(a, our_tokenizer), named(b, its_tokenizer))
        for text, position, a, b in differing[:SHOWN]
    ]
    return Tokens(len(pairs), len(differing), first)


@dataclass(frozen=True)
class Keys:
    """What one library did not find of a checkpoint, or did not use. Sorted names.

    Args:
        missing: parameters newly initialised; tied ones by one name.
        unexpected: keys that it has no parameter for and does not know to be dispensable.
    """

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class Report:
    """What `outplace.verify.verify` found.

    Args:
        versions: of outplace, torch and transformers.
        inputs: where the tokens come from.
        input_tokens: how many real ones both models were given.
        tokens: None where the tokenizers were not compared.
        keys: of `outplace` and of `transformers`.
        copied: parameters that upstream initialises, compared with the values they have here.
        notes: what else bears on the numbers.
    """

    checkpoint: str
    class_name: str
    dtype: str
    device: str
    attn_implementation: str
    versions: dict[str, str]
    tolerance: float
    inputs: str
    input_tokens: int
    tokens: Tokens | None
    differences: list[Difference]
    keys: dict[str, Keys]
    copied: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Difference:
        """The output with the largest relative difference."""
        return max(self.differences, key=lambda difference: difference.relative)

    @property
    def within(self) -> bool:
        """Whether every token is equal and every output within the tolerance."""
        return not (self.tokens and self.tokens.differing) and self.worst.relative <= self.tolerance

    @property
    def verdict(self) -> str:
        """One line that names the worst output, and tokens where they differ."""
        worst = self.worst
        if worst.relative == 0:
            line = "every output is the same number for number"
        else:
            side = "within" if worst.relative <= self.tolerance else "past"
            line = (
                f"{side} the tolerance of {self.tolerance:.0e}: the worst output is {worst.name}, "
                f"{worst.relative:.1e} of its largest magnitude"
            )
        if self.tokens and self.tokens.differing:
            line += f"; {self.tokens.differing} tokens differ"
        return f"{'equal' if self.within else 'NOT equal'}: {line}"

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON can hold it: an infinite difference is null."""
        found = asdict(self)
        for row in found["differences"]:
            row.update({key: None for key in ("absolute", "relative") if not math.isfinite(row[key])})
        return found | {"worst": self.worst.name, "within": self.within, "verdict": self.verdict}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        how = f"{self.class_name}, {self.dtype} on {self.device}, {self.attn_implementation}"
        yield f"{self.checkpoint}: {how}"
        yield ", ".join(f"{name} {version}" for name, version in self.versions.items())
        yield f"inputs: {self.inputs}, {self.input_tokens} tokens; padding is not compared"
        if self.tokens is not None:
            yield f"tokens: {self.tokens.compared} compared, {self.tokens.differing} differ"
            for place in self.tokens.first:
                yield (
                    f"  text {place.text}, token {place.position}: outplace {_token(place.outplace)}, "
                    f"transformers {_token(place.transformers)}"
                )
        width = max(len("output"), *(len(row.name) for row in self.differences))
        yield f"\n{'output':{width}}  largest difference  relative"
        for row in self.differences:
            yield f"{row.name:{width}}  {row.absolute:18.1e}  {row.relative:8.1e}"
        yield ""
        for library, keys in self.keys.items():
            missing, unexpected = _names("missing", keys.missing), _names("unexpected", keys.unexpected)
            yield f"keys, {library}: {missing}; {unexpected}"
        for note in self.notes:
            yield f"note: {note}"
        yield self.verdict


def _token(token: Token | None) -> str:
    return "nothing" if token is None else f"{token.piece!r} ({token.id})"


def _names(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"none {what}"
    return f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}"
