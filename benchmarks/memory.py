"""Which storages are alive, whose they are, and what the most of them at once is made of.

Works on numbers and on fake tensors alike: `Ledger` sees what operators return. What an operator allocates
and frees inside itself is not seen, nor what an allocator keeps for later.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["inputs", "parameters", "gradients", "optimizer state", "saved activations", "temporaries"]
KINDS: tuple[Kind, ...] = (
    "parameters",
    "optimizer state",
    "gradients",
    "saved activations",
    "temporaries",
    "inputs",
)
Phase = Literal["before", "forward", "backward", "optimizer"]
CUDA_BLOCK = 512
"""Bytes that the CUDA allocator rounds up to."""


@dataclass
class Block:
    """A storage.

    Args:
        bytes: its size.
        kind: what it is for; what backward needs of a forward pass is a saved activation, and what is none
            of the named is a temporary.
        phase, module, operator: when it was made, under which module and by what.
        shape, dtype: of the tensor it was made for.
    """

    bytes: int
    kind: Kind
    phase: Phase
    module: str
    operator: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Peak:
    """The most bytes that were alive at once, when that was, what they were, and the most in each phase."""

    bytes: int
    phase: Phase
    blocks: tuple[Block, ...]
    of_phases: dict[Phase, int]

    def parts(self) -> dict[str, int]:
        """Bytes of each kind."""
        return {kind: sum(b.bytes for b in self.blocks if b.kind == kind) for kind in KINDS}

    def by_module(self, *kinds: Kind) -> dict[str, int]:
        """Bytes of these kinds by the module that made them, largest first."""
        found: Counter[str] = Counter()
        for block in self.blocks:
            if block.kind in kinds:
                found.update({block.module or f"({block.phase})": block.bytes})
        return dict(found.most_common())

    def largest(self, count: int) -> list[dict[str, Any]]:
        """The largest storages that are neither parameters nor their optimiser's."""
        fixed = ("parameters", "optimizer state")
        blocks = sorted((b for b in self.blocks if b.kind not in fixed), key=lambda b: -b.bytes)
        return [asdict(block) for block in blocks[:count]]


class Ledger(TorchDispatchMode):
    """Follows every storage from the operator that makes it to its end.

    Args:
        model: whose modules' names are told.
        rounding: sizes are rounded up to it.
    """

    def __init__(self, model: nn.Module, rounding: int = 1) -> None:
        super().__init__()
        self.rounding = rounding
        self.total = self.highest = 0
        self.phase: Phase = "before"
        self._live: dict[int, Block] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._of_phases: dict[Phase, int] = {}
        self._at_highest: list[Block] | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf, "temporaries", str(func.name()).removeprefix("aten::"))
        return result

    def name(self, kind: Kind, tensors: Iterable[Tensor | None]) -> None:
        """Say what the storages of these tensors are for."""
        for tensor in tensors:
            if tensor is not None:
                self._enter(tensor, kind, "")
                self._live[tensor.untyped_storage()._cdata].kind = kind

    def end_forward(self) -> None:
        """What is alive now and was made in the forward pass, backward needs."""
        for block in self._live.values():
            if block.phase == "forward" and block.kind == "temporaries":
                block.kind = "saved activations"
        self.phase = "backward"

    def start(self) -> None:
        """Begin a step: the highest total is looked for from now on."""
        self.phase, self._of_phases = "forward", {"forward": self.total}
        self.highest, self._at_highest = self.total, None

    def peak(self) -> Peak:
        phase = max(self._of_phases, key=lambda phase: self._of_phases[phase])
        return Peak(self.highest, phase, tuple(self._at_highest or self._live.values()), self._of_phases)

    @contextmanager
    def watching(self) -> Iterator[Ledger]:
        """See operators and modules. Hooks are global: some modules take another way where they have any."""
        with ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self)
            yield self

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        self._inside.append(self._names.get(id(module), self._inside[-1] if self._inside else ""))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()

    def _enter(self, tensor: Tensor, kind: Kind, operator: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // self.rounding) * self.rounding
        if key in self._live or size == 0:
            return
        self._references[key] = weakref.ref(storage, lambda _: self._leave(key))
        module, dtype = self._inside[-1] if self._inside else "", str(tensor.dtype).removeprefix("torch.")
        self._live[key] = Block(size, kind, self.phase, module, operator, tuple(tensor.shape), dtype)
        self.total += size
        self._of_phases[self.phase] = max(self.total, self._of_phases.get(self.phase, 0))
        if self.total > self.highest:
            self.highest, self._at_highest = self.total, None

    def _leave(self, key: int) -> None:
        # A list of the living is made only when a highest total ends, which is seldom.
        if self.total == self.highest and self._at_highest is None:
            self._at_highest = list(self._live.values())
        del self._references[key]
        self.total -= self._live.pop(key).bytes
