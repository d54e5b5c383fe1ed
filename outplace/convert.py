"""`outplace convert`: a checkpoint of any age as safetensors under today's names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import add_hub_options, hub_options

if TYPE_CHECKING:
    from torch import Tensor

    from .models.base import PretrainedModel

DESCRIPTION = """\
Write a checkpoint as safetensors: pickled weights are read restricted to tensors, older names become
today's, tied parameters are written once. Everything is read back and compared. Configuration and
tokenizer files are copied.

example:
  outplace convert microsoft/deberta-v3-small -o deberta-v3-small"""

COMPANIONS = (
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "spm.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
"""Files that make a checkpoint of weights."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint, pickled or not, as safetensors",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="REPO_OR_DIR")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="made where it does not exist")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one file of weights (default: 5GB)"
    )
    add_hub_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .models.config import read_json_object
    from .weights.hub import fetch, fetch_config
    from .weights.saving import write_atomically, write_weights

    hub = hub_options(args)
    folder = Path(args.output)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give a folder to write the checkpoint in")
    config = read_json_object(fetch_config(args.checkpoint, **hub))
    tensors = read_tensors(args.checkpoint, hub)
    state, notes = renamed(tensors, config)
    companions = {name: fetch(args.checkpoint, name, **hub) for name in COMPANIONS}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in companions.items():
        if path is not None:
            write_atomically(folder / name, path.read_bytes())
    write_weights(state, folder, args.max_shard_size)
    compare(folder, state)
    for note in notes:
        print(note)
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"{folder}: {len(state)} tensors, {size:,} bytes, read back and equal")
    return 0


def read_tensors(checkpoint: str, hub: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names; those of most formats stay in their files until used.

    Raises:
        FileNotFoundError: it has no weights.
        CheckpointError: they are damaged, or more than tensors.
    """
    from .weights.hub import fetch_pickles, fetch_weights
    from .weights.pickled import read_pickles
    from .weights.reader import Reader

    try:
        paths, weight_map = fetch_weights(checkpoint, **hub)
    except FileNotFoundError:
        pickles = fetch_pickles(checkpoint, hub)
        if pickles is None:
            raise
        return read_pickles(pickles)
    with Reader(paths, weight_map) as reader:
        return {key: reader.read(key) for key in reader}


def renamed(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under today's names, tied ones once; and what was changed, a line each.

    What no class here knows keeps its name. Only counters of positions, which hold 0, 1, 2, …, are left
    out, and copies of what is there under its own name.

    Args:
        tensors: a checkpoint's, by their names.
        config: what its `config.json` holds.
    """
    from .weights.renames import is_dropped

    model = _skeleton(config, set(tensors))
    names = set(model.state_dict())
    state: dict[str, Tensor] = {}
    notes = []
    # Those under their own names come first, so that a renamed one meets what it may be a copy of.
    for key in sorted(tensors, key=lambda key: (_name(key, names, model) != key, key)):
        name, tensor = _name(key, names, model), tensors[key]
        if is_dropped(key, model.renames) and not tensor.is_floating_point():
            notes.append(f"left out: {key}, which counts positions")
        elif name not in state:
            state[name] = tensor
            if name != key:
                notes.append(f"renamed: {key} to {name}")
        elif _same(state[name], tensor):
            notes.append(f"left out: {key}, equal to {name}")
        else:
            state[key] = tensor
            notes.append(f"kept: {key}, which differs from {name}")
    base = f"{model.base_model_prefix}."
    for tied in model.ties().items():
        # The checkpoint may write the base model's names with or without its prefix.
        alias, owner = (next((x for x in (y, y.removeprefix(base)) if x in state), y) for y in tied)
        if alias in state and owner in state and _same(state[alias], state[owner]):
            del state[alias]
            notes.append(f"left out: {alias}, tied to {owner}")
    return state, notes


def _skeleton(config: dict[str, Any], keys: set[str]) -> PretrainedModel:
    """The model that a checkpoint is of, without storage."""
    import torch

    from .automatic import model_class

    cls = model_class(config, keys)
    with torch.device("meta"):
        return cls(cls.config_class.from_dict(config, **cls.config_overrides_for(keys)))


def _name(key: str, names: set[str], model: PretrainedModel) -> str:
    """Today's name of a checkpoint's key, with the base model's prefix where the key has it."""
    from .weights.renames import find_target

    base = f"{model.base_model_prefix}."
    name = find_target(key, names, base, model.renames)
    if name is None:
        return key
    if key.startswith(base):
        return base + name.removeprefix(base)
    return name.removeprefix(base)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in every bit, so that NaN equals itself."""
    import torch

    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    bits = (x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(*bits)


def compare(folder: Path, state: dict[str, Tensor]) -> None:
    """Read what was written back. Raises `CheckpointError` where it differs from `state`."""
    from .weights import CheckpointError
    from .weights.hub import fetch_weights
    from .weights.reader import Reader

    with Reader(*fetch_weights(folder)) as reader:
        written = set(reader)
        wrong = sorted(
            name for name in state if name not in written or not _same(reader.read(name), state[name])
        )
    if wrong or written != set(state):
        raise CheckpointError(f"{folder} reads back differently than it was written: {', '.join(wrong)}")
