"""Our blocks inside transformers' own classes: one line, and programs built on them run on ours.

    import outplace.transformers
    outplace.transformers.install()       # all models of the three families, from here on
    outplace.transformers.convert(model)  # or: this one

Upstream's classes stay: their names, module trees, parameters, loading and saving. Only what their methods
compute is replaced (`grafts`). docs/transformers.md says what is replaced, and what is not.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

try:
    import transformers as _upstream
except ImportError as error:
    raise ImportError(
        "outplace.transformers puts our blocks into transformers, which is not installed: "
        "pip install 'outplace[transformers]'"
    ) from error
from torch import nn

from .grafts import BACKBONES, GRAFTS, Settings, checked_attention, is_bound
from .structure import StructureError, Undo, put, replacements, take_back

__all__ = ["StructureError", "convert", "families", "install", "installed", "revert", "uninstall"]

M = TypeVar("M", bound=nn.Module)
FAMILIES = tuple(GRAFTS)

_lock = threading.RLock()
_undo: dict[str, Undo] = {}
"""By family that is installed: what stood in upstream's classes before."""
_converted: dict[type, type] = {}
"""The class of converted modules, by the class that they had."""


def install(families: str | Iterable[str] | None = None) -> None:
    """Run transformers' models of the families on our blocks, those that exist already too.

    Calling it again changes nothing. A model that was built before keeps the attention that it was built
    with; `convert` gives it ours.

    Args:
        families: of "deberta", "deberta-v2" and "esm"; all of them unless given.

    Raises:
        ValueError: an unknown family.
        StructureError: the installed transformers differs from what is replaced. Nothing is changed then.
    """
    with _lock:
        wanted = [family for family in _named(families) if family not in _undo]
        found = {family: replacements(family) for family in wanted}
        done: list[str] = []
        try:
            for family in wanted:
                _undo[family] = []
                done = [*done, family]
                put(found[family], _undo[family])
        except BaseException:
            for family in done:
                take_back(_undo.pop(family))
            raise


def uninstall(families: str | Iterable[str] | None = None) -> None:
    """Give transformers its own methods back; converted models stay converted.

    Args:
        families: as `install`'s. One that is not installed is left alone.
    """
    with _lock:
        for family in _named(families):
            take_back(_undo.pop(family, []))


@contextmanager
def installed(families: str | Iterable[str] | None = None) -> Iterator[None]:
    """Install for the length of a `with` block; what was installed before stays so after it."""
    with _lock:
        new = [family for family in _named(families) if family not in _undo]
        install(new)
    try:
        yield
    finally:
        uninstall(new)


def families() -> tuple[str, ...]:
    """Return the families that are installed now."""
    return tuple(family for family in FAMILIES if family in _undo)


def convert(model: M, attn_implementation: str | None = None, *, quiet: bool = False) -> M:
    """Run this model of transformers on our blocks, in place, and say on stderr what was found.

    Every backbone of the three families inside it is converted: in a `PeftModel`, a `SentenceTransformer`, a
    GLiNER or a class of your own. Parameters, hooks, adapters, quantised layers and flags stay as they are,
    nothing is copied. Converting again changes nothing.

    Args:
        attn_implementation: as `outplace`'s models take it; "auto" unless given, whatever the model was
            built with.
        quiet: say nothing.

    Returns:
        The same object.

    Raises:
        TypeError: no module.
        ValueError: no backbone in it, or an attention that one of them cannot have. Nothing is changed then.
        StructureError: as `install`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"convert takes a torch module, not {type(model).__name__}; give it the module inside, "
            "such as pipeline.model or the model_body of SetFit"
        )
    with _lock:
        replaced = {x.cls: x.members for family in FAMILIES for x in replacements(family)}
        bases = tuple(cls for cls in replaced if cls.__name__ in BACKBONES)
        backbones: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, bases)
        }
        if not backbones:
            raise ValueError(
                f"{type(model).__name__} holds no backbone of transformers that outplace has: "
                + ", ".join(BACKBONES)
            )
        configs = [module.config for module in backbones.values()]
        attention = [checked_attention(config, attn_implementation) for config in configs]
        for module in list(model.modules()):
            _swap(module, replaced)
        for config, asked in zip(configs, attention, strict=True):
            if asked is not None or not Settings(config).is_esm:
                config._attn_implementation_internal = asked
    count = "1 backbone" if len(backbones) == 1 else f"{len(backbones)} backbones"
    places = ", ".join(name or type(model).__name__ for name in backbones)
    if not quiet:
        print(f"outplace: {count} of {type(model).__name__} on our blocks: {places}", file=sys.stderr)
    return model


def revert(model: M) -> M:
    """Undo `convert`, in place.

    Returns:
        The same object.

    Raises:
        ValueError: nothing in it was converted.
    """
    with _lock:
        made = {sub: cls for cls, sub in _converted.items()}
        modules = [module for module in model.modules() if type(module) in made]
        if not modules:
            raise ValueError(
                f"{type(model).__name__} was not converted; what install() does is undone by uninstall()"
            )
        for module in modules:
            _rebind(module, made[type(module)])
            config: Any = getattr(module, "config", None)
            has_name = isinstance(module, _upstream.PreTrainedModel) and not Settings(config).is_esm
            if has_name and not _undo:  # Upstream names its attention; None stands for ours.
                config._attn_implementation_internal = "eager"
    return model


def _named(families: str | Iterable[str] | None) -> list[str]:
    names = FAMILIES if families is None else (families,) if isinstance(families, str) else tuple(families)
    for name in names:
        if name not in FAMILIES:
            raise ValueError(f"{name!r} is no family; it must be one of {', '.join(map(repr, FAMILIES))}")
    return list(dict.fromkeys(names))


def _swap(module: nn.Module, replaced: dict[type, dict[str, Any]]) -> None:
    """Give a module the class that runs our methods, where there is one."""
    cls = type(module)
    if cls in _converted.values():
        return
    if cls not in _converted:
        members = _members(cls, replaced)
        if not members:
            return
        _converted[cls] = _subclass(cls, members)
    _rebind(module, _converted[cls])


def _members(cls: type, replaced: dict[type, dict[str, Any]]) -> dict[str, Any]:
    """Return what a class takes over, which may be a user's subclass: what that overrides stays."""
    found: dict[str, Any] = {}
    own: set[str] = set()
    for base in cls.__mro__:
        found = {k: v for k, v in replaced.get(base, {}).items() if k not in own} | found
        own |= vars(base).keys() if base not in replaced else set()
    return found


def _subclass(cls: type, members: dict[str, Any]) -> type:
    """Return a class that looks like `cls`, pickles as `cls` and runs `members`."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return copyreg._reconstructor, (cls, object, None), self.__getstate__()  # type: ignore[attr-defined]

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        twin: nn.Module = made.__new__(made)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = type(
        cls.__name__, (cls,), same | members | {"__reduce_ex__": reduce, "__deepcopy__": deepcopy}
    )
    return made  # type: ignore[no-any-return]


def _rebind(module: nn.Module, cls: type) -> None:
    """Change a module's class, and the methods that accelerate's hooks took from the one before."""
    for name in ("forward", "_old_forward"):
        if is_bound(module, name):
            module.__dict__[name] = MethodType(cls.forward, module)  # type: ignore[attr-defined]
    module.__class__ = cls
