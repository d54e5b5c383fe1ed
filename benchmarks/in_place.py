"""The lines that wrote in place upstream, put back into our models at run time, to see what they do.

They are those of transformers 4.46.3 (DeBERTa) and 4.33.3 (ESM) that write to a tensor of the graph; its
pull requests 35898 and 26454 replaced most of them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from outplace.models.attention import disentangled
from outplace.models.deberta.blocks import Embeddings
from outplace.models.deberta.modeling import DisentangledSelfAttention
from outplace.models.esm.modeling import EsmEmbeddings, Residual


@dataclass(frozen=True)
class Line:
    """A line that wrote in place.

    Args:
        historic: as it stood upstream.
        families: whose models go through it.
        owner, function: the class or module, and the name of what it is in.
        ours: what stands there now.
        theirs: what does upstream's write there.
    """

    historic: str
    families: tuple[str, ...]
    owner: Any
    function: str
    ours: str
    theirs: str


DEBERTAS = ("Deberta", "DebertaV2")
LINES = (
    Line(
        "embeddings += position_embeddings",
        DEBERTAS,
        Embeddings,
        "forward",
        "embeddings = embeddings + self.positions(length, position_ids, embeddings.device)",
        "embeddings += self.positions(length, position_ids, embeddings.device)",
    ),
    Line(
        "embeddings += token_type_embeddings",
        DEBERTAS,
        Embeddings,
        "forward",
        "embeddings = embeddings + self.token_type_embeddings(token_type_ids)",
        "embeddings += self.token_type_embeddings(token_type_ids)",
    ),
    Line(
        "score += p2c_att",
        DEBERTAS,
        disentangled,
        "position_scores",
        "position = p2c if position is None else position + p2c",
        "position = p2c if position is None else position.add_(p2c)",
    ),
    Line(
        "pos_query_layer /= …",
        ("Deberta",),
        DisentangledSelfAttention,
        "project_positions",
        "pos_query = self.heads(self.pos_q_proj(table))[0] / self.scale",
        "pos_query = self.heads(self.pos_q_proj(table)).div_(self.scale)[0]",
    ),
    Line(
        "embeddings.masked_fill_(…, 0.0)",
        ("Esm",),
        EsmEmbeddings,
        "forward",
        "embeddings = token_dropout(embeddings, is_mask, attention_mask, sequences)",
        "embeddings = token_dropout("
        "embeddings if is_mask is None else embeddings.masked_fill_(is_mask.unsqueeze(-1), 0.0), "
        "is_mask, attention_mask, sequences)",
    ),
    Line(
        "embeddings += position_embeddings",
        ("Esm",),
        EsmEmbeddings,
        "forward",
        "embeddings = embeddings + position_embeddings(position_ids)",
        "embeddings += position_embeddings(position_ids)",
    ),
    Line(
        "hidden_states += input_tensor",
        ("Esm",),
        Residual,
        "add",
        "return drop(self.dropout, x) + residual",
        "return drop(self.dropout, x).add_(residual)",
    ),
)


def rewritten(function: Callable[..., Any], lines: Iterable[Line]) -> Callable[..., Any]:
    """The function with lines of it replaced.

    Raises:
        LookupError: it has no such line, or more than one.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for line in lines:
        if source.count(line.ours) != 1:
            times = source.count(line.ours)
            raise LookupError(f"{function.__qualname__} has the line {line.ours!r} {times} times, not once")
        source = source.replace(line.ours, line.theirs)
    namespace = dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source, inspect.getfile(function), "exec"), namespace
    )
    made: Callable[..., Any] = namespace[function.__name__]
    return made


@contextmanager
def in_place(lines: Iterable[Line] = LINES) -> Iterator[None]:
    """Our models with those lines."""
    places: dict[tuple[Any, str], list[Line]] = {}
    for line in lines:
        places.setdefault((line.owner, line.function), []).append(line)
    with ExitStack() as stack:
        for (owner, name), found in places.items():
            stack.enter_context(mock.patch.object(owner, name, rewritten(getattr(owner, name), found)))
        yield
