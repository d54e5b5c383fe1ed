"""Make a model of a checkpoint: the way of a weight from a file to a parameter."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..models.config import read_json_object
from .errors import CheckpointError
from .hub import HUB_OPTIONS, fetch_config, fetch_weights
from .reader import Reader
from .renames import find_target, is_dropped

if TYPE_CHECKING:
    from ..models.base import PretrainedModel
    from ..models.config import PretrainedConfig

M = TypeVar("M", bound="PretrainedModel")
logger = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """What a checkpoint and a model had not in common. All lists are sorted names.

    Args:
        missing: parameters that the checkpoint did not hold, which are newly initialised.
        unexpected: keys of the checkpoint that the model has no parameter for.
        ignored: such keys that are known to fill nothing.
        untied: parameters that the config ties, kept apart because the checkpoint's values differ.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)

    @property
    def matched(self) -> bool:
        """Whether nothing is worth a warning."""
        return not (self.missing or self.unexpected or self.untied)

    def __str__(self) -> str:
        lines = [
            (self.missing, "missing from the checkpoint, newly initialised"),
            (self.unexpected, "in the checkpoint, not in the model"),
            (self.untied, "not tied, since the checkpoint holds two different values"),
        ]
        return (
            "; ".join(f"{what}: {', '.join(names)}" for names, what in lines if names) or "all keys matched"
        )


def load_checkpoint(
    choose: Callable[[dict[str, Any], Collection[str]], type[M]],
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    config: PretrainedConfig | None = None,
    attn_implementation: str | None = None,
    strict: bool = False,
    allow_pickle: bool = False,
    **rest: Any,
) -> M:
    """See `PretrainedModel.from_pretrained`.

    Args:
        choose: gives the class for the values of a `config.json` and the names of a checkpoint's tensors.
        rest: `HUB_OPTIONS`, fields of the configuration, keywords of the model's constructor.
    """
    hub = {name: rest.pop(name) for name in HUB_OPTIONS if name in rest}
    if config is None:
        values = read_json_object(fetch_config(name_or_path, **hub))
    else:
        values = config.to_dict()
    paths, weight_map = fetch_weights(name_or_path, allow_pickle=allow_pickle, **hub)
    with Reader(paths, weight_map) as reader:
        keys = set(reader)
        cls = choose(values, keys)
        options = {name: rest.pop(name) for name in _constructor_options(cls) if name in rest}
        overrides = cls.config_overrides_for(keys) | rest
        config = (
            cls.config_class.from_dict(values, **overrides) if config is None else config.replace(**overrides)
        )
        with torch.device("meta"):
            model = cls(config, attn_implementation=attn_implementation, **options)
        fill(model, reader, _resolve_dtype(dtype, config, reader), torch.device(device or "cpu"), strict)
    assert model.load_report is not None
    if not model.load_report.matched:
        logger.warning("%s from %s: %s", cls.__name__, name_or_path, model.load_report)
    return model.eval()


def fill(
    model: PretrainedModel, reader: Reader, dtype: torch.dtype, device: torch.device, strict: bool
) -> None:
    """Give every parameter and buffer of a model on `meta` its value, and the model its report.

    All names, shapes and dtypes are checked before the first value is set.

    Raises:
        CheckpointError: as `PretrainedModel.from_pretrained`.
    """
    from ..models.base import initialize

    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    report = LoadReport()
    source = match(model, reader, names, report)
    ties = model.ties()
    for alias, owner in ties.items():
        if alias in source and owner not in source:
            source[owner] = source.pop(alias)
        elif alias in source and torch.equal(reader.read(source[alias]), reader.read(source[owner])):
            del source[alias]
        elif alias in source:
            report.untied.append(alias)
    report.missing = sorted(name for name in names if name not in source and ties.get(name) not in source)
    _check(reader, source, names)
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(f"strict loading into {type(model).__name__}: {report}")

    for name, key in source.items():
        # Rotary frequencies keep the precision they were trained with.
        own = torch.float32 if name.endswith("inv_freq") else dtype
        _set(model, name, reader.read(key).to(device=device, dtype=own))
    for name in report.missing:
        module, _, attribute = name.rpartition(".")
        if isinstance(names[name], nn.Parameter):
            _set(model, name, torch.empty(names[name].shape, dtype=dtype, device=device))
        else:
            _set(model, name, model.get_submodule(module).initial_buffers()[attribute].to(device))  # type: ignore[operator]
    initialize(model, model.config.initializer_range, only=set(report.missing))
    model.tie_weights([name for name in ties if name not in report.untied])
    model.load_report = report


def match(
    model: PretrainedModel, keys: Iterable[str], names: Collection[str], report: LoadReport
) -> dict[str, str]:
    """For each name of the model that the checkpoint fills, the key there; the rest goes to the report."""
    source: dict[str, str] = {}
    for key in keys:
        name = find_target(key, names, f"{model.base_model_prefix}.", model.renames)
        if name is None:
            (report.ignored if is_dropped(key, model.renames) else report.unexpected).append(key)
        elif name == key or name not in source:  # its own name is worth more than one renamed to it
            source[name] = key
    return source


def _check(reader: Reader, source: dict[str, str], names: dict[str, Tensor]) -> None:
    for name, key in source.items():
        wanted, found = tuple(names[name].shape), reader.shape(key)
        if wanted != found:
            raise CheckpointError(
                f"{key} has shape {found} in the checkpoint; {name} of the model has {wanted}"
            )
        if reader.float_dtype(key) is None:
            raise CheckpointError(
                f"{key} is not of a floating dtype that {name} can have: {reader.dtype(key)}"
            )


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    prefix, _, attribute = name.rpartition(".")
    module = model.get_submodule(prefix)
    old = getattr(module, attribute)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
    setattr(module, attribute, value)


def _resolve_dtype(asked: torch.dtype | str | None, config: PretrainedConfig, reader: Reader) -> torch.dtype:
    """The dtype asked for, else the config's, else the one that most of the checkpoint's tensors have."""
    if asked is None or asked == "auto":
        asked = config.dtype
    if asked is None:
        counts = Counter(dtype for key in reader if (dtype := reader.float_dtype(key)) is not None)
        return counts.most_common(1)[0][0] if counts else torch.float32
    dtype = getattr(torch, asked.removeprefix("torch."), None) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"dtype {asked!r} is no floating dtype of torch, such as 'float32' or torch.bfloat16"
        )
    return dtype


def _constructor_options(cls: type[PretrainedModel]) -> list[str]:
    return [
        name for name in inspect.signature(cls).parameters if name not in ("config", "attn_implementation")
    ]
