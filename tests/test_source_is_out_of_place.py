"""No code of ours that computes with tensors writes to one: a check of the source, without running it.

It complements the auditor, which sees only the paths that a run takes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outplace.models
import pytest

MODELS = Path(outplace.models.__path__[0])
INITIALISATION = ("base.py", "initialize")
"""The one function of the project that may write to tensors: the values a new model starts from."""


def violations(source: str, file: str = "") -> list[str]:
    """What in a module may write to a tensor, as `line: code`.

    Everywhere: calls of `name_` other than `requires_grad_`, `out=` and `inplace=`. In a module that
    imports torch, further: augmented assignment, and assignment to a subscript that is no string;
    the source does not say whether it is a tensor that they write to, so tensor code does without.

    Kernels (`@triton.jit`) and the function `INITIALISATION` are left out.
    """
    tree = ast.parse(source)
    has_tensors = any(_imports_torch(node) for node in ast.walk(tree))
    found = sorted({node.lineno for node in _checked(tree, file) if _may_write(node, has_tensors)})
    text = source.splitlines()
    return [f"{number}: {text[number - 1].strip()}" for number in found]


def _checked(node: ast.AST, file: str) -> Iterator[ast.AST]:
    """The nodes below `node` that the rule holds for."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and (_is_kernel(child) or (file, child.name) == INITIALISATION):
            continue
        yield child
        yield from _checked(child, file)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(d.func if isinstance(d, ast.Call) else d) == "triton.jit" for d in function.decorator_list
    )


def _imports_torch(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
    return any(name.split(".")[0] == "torch" for name in names)


def _may_write(node: ast.AST, has_tensors: bool) -> bool:
    if isinstance(node, ast.Attribute):
        # The attribute, not its call: `f = x.add_` writes later.
        name = node.attr
        return name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
    if isinstance(node, ast.keyword):
        return node.arg in ("out", "inplace")
    if not has_tensors:
        return False
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str))
    return isinstance(node, ast.AugAssign)


@pytest.mark.parametrize("path", sorted(MODELS.rglob("*.py")), ids=lambda path: str(path.relative_to(MODELS)))
def test_no_model_code_writes_in_place(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), str(path.relative_to(MODELS))) == []


def test_initialisation_is_one_function_and_without_gradients() -> None:
    file, name = INITIALISATION
    source = (MODELS / file).read_text(encoding="utf-8")
    assert violations(source, file) == []
    assert violations(source) != []
    (function,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert "torch.no_grad()" in [ast.unparse(decorator) for decorator in function.decorator_list]


@pytest.mark.parametrize(
    "statement",
    [
        "x += y",
        "x /= 2",
        "self.x *= y",
        "x[0] = 1",
        "x[mask] += 1",
        "a, x[0] = 1, 2",
        "x[0]: int = 1",
        "x.masked_fill_(mask, 0)",
        "x.data.add_(1)",
        "torch.relu_(x)",
        "F.relu(x, inplace=True)",
        "nn.Dropout(0.1, inplace=True)",
        "torch.add(x, y, out=z)",
        "write = x.add_",
        "for x[0] in y: pass",
        "with torch.no_grad():\n    x.zero_()",
        "@other.jit\ndef kernel(x):\n    x += 1",
        "def initialize(x):\n    x.zero_()",
    ],
)
def test_a_statement_that_may_write_is_found(statement: str) -> None:
    assert len(violations(f"import torch\n{statement}")) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "x = x + y",
        "x = x.masked_fill(mask, 0)",
        "x.requires_grad_(False)",
        "self.x = y[0]",
        "super().__init__()",
        "self._private_",
        "x = x[mask]",
        "f(output=x, without=y)",
        "ties['head'] = 'embeddings'",
        "@triton.jit\ndef kernel(x):\n    x += 1\n    x[0] = 1",
        "@triton.jit(debug=True)\ndef kernel(x):\n    x += 1",
    ],
)
def test_a_statement_that_cannot_write_is_not_found(statement: str) -> None:
    assert violations(f"from torch import nn\n{statement}") == []


def test_a_module_without_tensors_may_fill_its_dictionaries() -> None:
    assert violations("import json\nvalues = {}\nvalues[0] = 1") == []
    assert violations("from .torch import x\ncount = 0\ncount += 1") == []
    assert violations("import json\nx.add_(1)") != []
