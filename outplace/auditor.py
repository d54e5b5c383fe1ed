"""Find every write a model makes to a tensor: `outplace.audit(model, **inputs)`.

A call into torch may write to tensors that torch itself has just made: dropout fills fresh noise,
the gradient of a strided view is gathered by `index_add_`. Such a write can hurt nobody. The rule that
tells them from the model's own writes has one sentence: **a write is the model's own if the storage
it goes to existed before the enclosing call began.** The enclosing call is the outermost call from
Python into torch (`x.add_(1)`, `F.dropout(x)`), or, in backward, the node of the graph that runs; but
where that node runs code of the model again, as a custom autograd function or a recomputed checkpoint
does, it is the call made there. An in-place call on a tensor made a line before is thus the model's
own, and a storage that was not seen being made counts as having existed.

Gradients that autograd adds up, in a leaf's `.grad` or between two nodes, are listed apart from both.

Two views of the run make this visible. Below autograd, a dispatch mode sees each operator, which of its
arguments it writes to and which storages it makes; above, a function mode sees each call from Python.
Hooks mark where the nodes of the graph begin and end. What goes around torch (a numpy array over the
same memory, a kernel launched on a data pointer) is not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Phase = Literal["forward", "backward"]

_NOT_USER_CODE = (os.path.dirname(torch.__file__) + os.sep, __file__)

# Operators of other libraries are not taken at their word: their arguments are compared before and after.
_TRUSTED = ("aten", "prim", "prims")

_RUN_ENGINE = graph._engine_run_backward.__code__
_CALL_MODULE = nn.Module._call_impl.__code__

# How torch words that it refuses a write before an operator runs; and that an operator that was seen
# to run may not write there, or has written over what autograd needs.
_REFUSED = re.compile(
    r"\bin-?place (operation|update|version)|(modified|modifies|views) in-?place|functions with out=",
    re.IGNORECASE,
)
_COMPLAINED = re.compile(
    r"modified by an inplace operation|written-to tensor refers to a single memory location"
)


@dataclass(frozen=True)
class Line:
    """A line of user code: what is neither in the `torch` package nor in this file."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source, or an empty string where there is none."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"


@dataclass(frozen=True)
class Write:
    """One argument written to by one call.

    Attributes:
        operator: the operator below autograd, `aten.add_.Tensor`; for a write that autograd refused,
            which never got there, the function called from Python, `torch.Tensor.add_`.
        argument: its name in the operator's signature, or its place in the call from Python.
        target: what is written to: `parameter encoder.weight`, `input input_ids`, else dtype and shape.
        call: the enclosing call, or the node of the graph.
        phase: "backward" also covers what is recomputed there.
        line: the innermost line of user code; for a node of the graph, which has none, the line of its
            forward; None where neither is known.
        is_view: whether the tensor is a view of another.
        is_input: whether it is, or is a view of, an argument of the audited call.
        is_leaf: whether it is a leaf that requires a gradient.
        from_custom_function: whether it is an output of a custom `torch.autograd.Function`, or a view of one.
        refused: whether autograd refused it.
    """

    operator: str
    argument: str
    target: str
    call: str
    phase: Phase
    line: Line | None
    is_view: bool = False
    is_input: bool = False
    is_leaf: bool = False
    from_custom_function: bool = False
    refused: bool = False

    def traits(self) -> str:
        """The flags that are set, in words."""
        words = {
            "view": self.is_view,
            "leaf": self.is_leaf,
            "of a custom function": self.from_custom_function,
            "REFUSED": self.refused,
        }
        return ", ".join(word for word, holds in words.items() if holds)


@dataclass
class AuditReport:
    """What `audit` saw. `str(report)` is a table.

    Attributes:
        subject: what was run.
        writes: the model's own.
        torch_writes: those that torch makes to tensors of its own.
        gradient_accumulation: those by which autograd adds up gradients.
        error: the exception with which torch refused a write, or a backward whose values were written over.
        backward: whether there was one, to its end unless `error` stopped it.
        notes: anything the reader should know about the run.
    """

    subject: str
    writes: list[Write] = field(default_factory=list)
    torch_writes: list[Write] = field(default_factory=list)
    gradient_accumulation: list[Write] = field(default_factory=list)
    error: RuntimeError | None = None
    backward: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.writes and self.error is None

    def __str__(self) -> str:
        ran = "forward and backward" if self.backward else "forward only"
        count = f"{len(self.writes)} write{'s' * (len(self.writes) != 1)}"
        lines = [f"{self.subject}: {count} of its own ({ran})"]
        lines += _table(self.writes)
        lines += [f"torch refused the run: {str(self.error).splitlines()[0]}"] if self.error else []
        lines += [f"note: {note}" for note in self.notes]
        lines.append(
            f"not counted: {len(self.torch_writes)} by torch to tensors of its own, "
            f"{len(self.gradient_accumulation)} adding up gradients"
        )
        return "\n".join(lines)


def audit(target: Callable[..., Any], *args: Any, backward: bool = True, **kwargs: Any) -> AuditReport:
    """Run a module or function and report every write to a tensor that existed before.

    Afterwards the module, the inputs, their `.grad` and the random number generators are as they were:
    what the run wrote to parameters, buffers and inputs is put back.

    Args:
        target: any callable on tensors; of a module, as it is: in its mode, on its device.
        args, kwargs: handed to it.
        backward: whether to backpropagate ones from every floating output that requires a gradient,
            however deep in tuples, mappings and dataclasses it is.

    Raises:
        Exception: whatever `target` raises, except torch's refusal of a write, which is a finding.
    """
    module = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    recorder = _Recorder(target, module if isinstance(module, nn.Module) else None, (args, kwargs))
    report = recorder.report
    inputs = list(_tensors((args, kwargs)))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            with recorder.watching():
                output = target(*args, **kwargs)
            roots = [t for t in _tensors(output) if t.requires_grad and not t.is_sparse] if backward else []
            if roots:
                recorder.set_grads_aside(leaf for root in roots for leaf in _leaves(root))
                ones = [torch.ones_like(root) for root in roots]
                # A graph that reaches beyond the inputs is the caller's, who may still need it.
                retain = any(tensor.grad_fn is not None for tensor in inputs)
                report.backward = True
                with recorder.watching():
                    torch.autograd.backward(roots, ones, retain_graph=retain)
            elif backward:
                report.notes.append("no output requires a gradient, so there was no backward to run")
        except RuntimeError as error:
            if not recorder.note_refusal(error, line=_line_of(error)):
                raise
            report.error = error
        finally:
            recorder.restore()
    return report


@dataclass
class _Scope:
    """An enclosing call: one from Python, or a node of the graph."""

    began: int
    call: str
    arguments: Any = ()
    is_node: bool = False
    node_line: Line | None = None
    accumulates: bool = False
    graph_task: int = field(default_factory=lambda: _graph_task())


class _Recorder:
    """The state of one audit."""

    def __init__(self, target: Callable[..., Any], module: nn.Module | None, inputs: Any) -> None:
        name = type(target).__name__ if module is target else getattr(target, "__name__", repr(target))
        self.report = AuditReport(subject=name)
        self.calls = _Calls(self)
        self.clock = itertools.count(1)
        # When a storage was first seen, 0 if as an argument. A weak reference holds no memory, but the
        # address: no later storage can be taken for this one.
        self.born: dict[StorageWeakRef, int] = {}
        self.names: dict[StorageWeakRef, str] = {}
        self.inputs: set[StorageWeakRef] = set()
        # What `restore` puts back.
        self.copies: dict[StorageWeakRef, tuple[Tensor, torch.UntypedStorage]] = {}
        self.grads: list[tuple[Tensor, Tensor | None]] = []
        self.hooks: list[Any] = []
        self.mark = object()  # in the metadata of nodes that are hooked
        self.refusals: list[RuntimeError] = []
        self.local = threading.local()  # CUDA nodes run in a thread of autograd's
        for path, leaf in pytree.tree_leaves_with_path(inputs):
            for tensor in _tensors(leaf):
                key = _storage(tensor)
                if key is not None:
                    self.inputs.add(key)
                    self.names[key] = f"input {_argument_name(path)}"
        if module is not None:
            for kind, pairs in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for name, tensor in pairs:
                    key = _storage(tensor)
                    if key is not None:
                        self.names[key] = f"{kind} {name}"
        owned = [*_tensors(inputs), *(module.parameters() if module is not None else ())]
        self.set_grads_aside(t for t in owned if t.is_leaf and t.requires_grad)

    def restore(self) -> None:
        """Put back what was there before: hooks, gradients, contents."""
        for hook in self.hooks:
            hook.remove()
        for tensor, grad in self.grads:
            tensor.grad = grad
        for tensor, content in self.copies.values():
            storage = tensor.untyped_storage()
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)

    def set_grads_aside(self, leaves: Iterator[Tensor]) -> None:
        known = {id(tensor) for tensor, _ in self.grads}
        for leaf in leaves:
            if id(leaf) not in known:
                known.add(id(leaf))
                self.grads.append((leaf, leaf.grad))
                leaf.grad = None

    def watching(self) -> ExitStack:
        """Both modes; and the function mode again inside autograd's engine, which a call entered."""
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def engine(roots: Any, *args: Any, **kwargs: Any) -> Any:
            for root in roots:
                self.know(root.grad_fn if isinstance(root, Tensor) else root.node)
            with self.calls:
                return run(roots, *args, **kwargs)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", engine))
        stack.enter_context(_Operators(self))
        stack.enter_context(self.calls)
        return stack

    @property
    def scopes(self) -> list[_Scope]:
        if not hasattr(self.local, "scopes"):
            self.local.scopes = []
        return self.local.scopes  # type: ignore[no-any-return]

    def enclosing(self) -> _Scope | None:
        """The enclosing call, of this backward where one runs. None between two of its nodes."""
        scopes = self.scopes
        return scopes[-1] if scopes and scopes[-1].graph_task == _graph_task() else None

    # Above autograd

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call from Python into torch as an enclosing call."""
        enclosing = self.enclosing()
        if enclosing is not None and enclosing.is_node and not _is_called_by_model(sys._getframe()):
            return func(*args, **kwargs)  # by a node that torch has written in Python
        scopes, depth = self.scopes, len(self.scopes)
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        scopes.append(_Scope(next(self.clock), name, (args, kwargs)))
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            self.note_refusal(error, name, args, kwargs, line=_line(sys._getframe()))
            raise
        finally:
            del scopes[depth:]  # with nodes that an error left open
        for tensor in _tensors(result):
            self.know(tensor.grad_fn, sys._getframe())
        return result

    def note_refusal(
        self,
        error: RuntimeError,
        name: str = "custom autograd function",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        line: Line | None = None,
    ) -> bool:
        """Record a write that autograd refused, for it is seen nowhere else.

        Returns:
            Whether the error is torch's complaint of a write, this one or an earlier one.
        """
        if error in self.refusals or _COMPLAINED.search(str(error)):
            return True
        if not _REFUSED.search(str(error)):
            return False
        self.refusals.append(error)
        given = dict(_named_tensors(args, kwargs or {}))
        argument = "out" if "out" in given else next(iter(given), "?")
        described = self.describe(given[argument]) if given else {"target": "a tensor"}
        self.report.writes.append(
            Write(name, argument, call=name, phase=_phase(), line=line, refused=True, **described)
        )
        return True

    def know(self, root: Any, frame: FrameType | None = None) -> None:
        """Hook the nodes of the graph from `root` back to those known; `frame` has just made them."""
        for node in _graph(root, lambda node: self.mark in node.metadata):
            line = node.metadata[self.mark] = _line(frame)
            self.hooks += [
                node.register_prehook(self.node_begins(node.name(), line)),
                node.register_hook(self.node_ends),
            ]

    def node_begins(self, name: str, line: Line | None) -> Callable[[Any], None]:
        def begin(_: Any) -> None:
            accumulates = name == "torch::autograd::AccumulateGrad"
            self.scopes.append(
                _Scope(next(self.clock), name, is_node=True, node_line=line, accumulates=accumulates)
            )

        return begin

    def node_ends(self, *_: Any) -> None:
        self.scopes.pop()

    # Below autograd

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and take note of what it makes and what it writes to."""
        bound = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        declared = _declared_writes(func, bound)
        tensors = list(_named_tensors((), bound))
        for _, tensor in tensors:
            key = _storage(tensor)
            if key is not None:
                self.born.setdefault(key, 0)
        doubted = []
        for name, tensor in tensors:
            if name in declared:
                self.keep_copy(tensor)
                self.record(str(func), name, tensor)
            elif func.namespace not in _TRUSTED:
                doubted.append((name, tensor, tensor.clone()))
        result = func(*args, **kwargs)
        for name, tensor, before in doubted:
            if not _same(tensor, before):
                self.record(str(func), name, tensor)
        for tensor in _tensors(result):
            key = _storage(tensor)
            if key is not None:
                self.born.setdefault(key, next(self.clock))
        return result

    def keep_copy(self, tensor: Tensor) -> None:
        """Before the first write to a parameter, buffer or input."""
        key = _storage(tensor)
        if key is not None and key in self.names and key not in self.copies:
            self.copies[key] = (tensor.detach(), tensor.untyped_storage().clone())

    def record(self, operator: str, argument: str, tensor: Tensor) -> None:
        """File a write by the rule. `tensor` is argument `argument` of `operator`, about to run."""
        scope, phase, key = self.enclosing(), _phase(), _storage(tensor)
        if scope is None and phase == "backward":
            scope = _Scope(next(self.clock), "autograd", is_node=True, accumulates=True)
        elif scope is None:
            scope = _Scope(next(self.clock), operator)  # an operator that nothing encloses is a call
        if key is not None and self.born.get(key, 0) > scope.began:
            found = self.report.torch_writes
        elif scope.accumulates:
            found = self.report.gradient_accumulation
        else:
            found = self.report.writes
        # What the code names is rather an argument of the call: `x[0] = 1` writes to a view of x.
        named = next((given for given in _tensors(scope.arguments) if _storage(given) == key), tensor)
        line = scope.node_line if scope.is_node else _line(sys._getframe())
        found.append(
            Write(operator, argument, call=scope.call, phase=phase, line=line, **self.describe(named))
        )

    def describe(self, tensor: Tensor) -> dict[str, Any]:
        """What `Write` says about a tensor."""
        with torch._C.DisableTorchFunction():
            key = _storage(tensor)
            form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            family = [tensor, tensor._base] if tensor._base is not None else [tensor]
            return {
                "target": self.names.get(key, form) if key is not None else form,
                "is_view": len(family) > 1,
                "is_input": key in self.inputs,
                "is_leaf": any(t.is_leaf and t.requires_grad for t in family),
                "from_custom_function": any(isinstance(t.grad_fn, FunctionCtx) for t in family),
            }


class _Calls(TorchFunctionMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.recorder.operator(func, args, kwargs or {})


def _declared_writes(func: Any, bound: dict[str, Any]) -> set[str]:
    """Names of the arguments that an operator says it writes to.

    Batch norm's older operators say it only when asked about training, through torch's `_SchemaInfo`.
    """
    info = torch._C._SchemaInfo(func._schema)
    info.add_argument_values({name: value for name, value in bound.items() if isinstance(value, bool)})
    kind = torch._C._SchemaArgType.input
    return {
        argument.name
        for i, argument in enumerate(func._schema.arguments)
        if info.is_mutable(torch._C._SchemaArgument(kind, i))
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value: in pytrees, `to_tuple()`, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif value is None or isinstance(value, str | int | float | type):
        return
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif hasattr(value, "to_tuple"):
        yield from _tensors(value.to_tuple())
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from _tensors(getattr(value, entry.name, None))


def _named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]:
        for tensor in _tensors(value):
            yield name, tensor


def _graph(root: Any, is_known: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes from `root` towards the leaves, each once, up to those known."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen and not is_known(node):
            seen.add(node)
            yield node
            nodes += [successor for successor, _ in node.next_functions]


def _leaves(root: Tensor) -> Iterator[Tensor]:
    """The leaves whose `.grad` a backward from `root` would add to."""
    if root.grad_fn is None:
        yield root
    for node in _graph(root.grad_fn, lambda _: False):
        if hasattr(node, "variable"):
            yield node.variable


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """The identity of a tensor's storage; None where it has none of its own, as a sparse one."""
    with torch._C.DisableTorchFunction():
        try:
            return StorageWeakRef(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN being the same as NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _graph_task() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def _phase() -> Phase:
    return "forward" if _graph_task() == -1 else "backward"


def _is_user_code(file: str) -> bool:
    return not file.startswith(_NOT_USER_CODE)


def _line(frame: FrameType | None) -> Line | None:
    """The innermost line of user code from `frame` outwards, up to the call of `audit`."""
    while frame is not None and frame.f_code is not audit.__code__:
        if _is_user_code(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def _is_called_by_model(frame: FrameType | None) -> bool:
    """Whether user code or a module stands between `frame` and autograd's engine."""
    while frame is not None and frame.f_code is not _RUN_ENGINE:
        if _is_user_code(frame.f_code.co_filename) or frame.f_code is _CALL_MODULE:
            return True
        frame = frame.f_back
    return False


def _line_of(error: BaseException) -> Line | None:
    """The innermost line of user code that an error passed through."""
    line, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_user_code(code.co_filename):
            line = Line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return line


def _argument_name(path: tuple[Any, ...]) -> str:
    """`0` or `input_ids`, with what leads further in, of a leaf of `(args, kwargs)`."""
    first = path[1]
    return str(getattr(first, "key", getattr(first, "idx", first))) + pytree.keystr(path[2:])


def _table(writes: list[Write]) -> list[str]:
    """Equal writes once, with their number; aligned columns."""
    rows = [("times", "phase", "line", "operator", "writes to", "code")]
    for write, times in Counter(writes).items():
        unknown = "autograd" if write.phase == "backward" else "-"
        traits = write.traits()
        target = write.target + (f" ({traits})" if traits else "")
        code = write.line.text if write.line else write.call
        rows.append((str(times), write.phase, str(write.line or unknown), write.operator, target, code))
    if len(rows) == 1:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in padded]
