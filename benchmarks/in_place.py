"""The lines that wrote in place upstream, put back into our models at run time, to see what they save.

They are those that transformers' pull requests 35898 (DeBERTa) and 26454 (ESM) replaced.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from outplace.models.deberta.blocks import Embeddings
from outplace.models.esm.modeling import EsmEmbeddings, Residual

LINES: dict[tuple[type, str], tuple[tuple[str, str], ...]] = {
    (Embeddings, "forward"): (
        (
            "embeddings = embeddings + self.positions(length, position_ids, embeddings.device)",
            "embeddings += self.positions(length, position_ids, embeddings.device)",
        ),
        (
            "embeddings = embeddings + self.token_type_embeddings(token_type_ids)",
            "embeddings += self.token_type_embeddings(token_type_ids)",
        ),
    ),
    (EsmEmbeddings, "forward"): (
        (
            "embeddings = token_dropout(embeddings, is_mask, real, sequences)",
            "embeddings = token_dropout("
            "embeddings if is_mask is None else embeddings.masked_fill_(is_mask.unsqueeze(-1), 0.0), "
            "is_mask, real, sequences)",
        ),
        (
            "embeddings = embeddings + self.position_embeddings(position_ids)",
            "embeddings += self.position_embeddings(position_ids)",
        ),
    ),
    (Residual, "add"): (
        (
            "return self.dropout(x) + residual",
            "return self.dropout(x).add_(residual)",
        ),
    ),
}
"""What is ours and what was theirs, in a method of each class."""


def rewritten(function: Callable[..., Any], lines: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """The function with lines of it replaced.

    Raises:
        LookupError: it has no such line, or more than one.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for ours, theirs in lines:
        if source.count(ours) != 1:
            raise LookupError(
                f"{function.__qualname__} has the line {ours!r} {source.count(ours)} times, not once"
            )
        source = source.replace(ours, theirs)
    namespace = dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source, inspect.getfile(function), "exec"), namespace
    )
    made: Callable[..., Any] = namespace[function.__name__]
    return made


@contextmanager
def in_place() -> Iterator[None]:
    """Our models with those lines."""
    with ExitStack() as stack:
        for (module, name), lines in LINES.items():
            method = rewritten(getattr(module, name), lines)
            stack.enter_context(mock.patch.object(module, name, method))
        yield
