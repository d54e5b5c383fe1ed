"""Write a model: the way of a parameter to a file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from .hub import INDEX, WEIGHTS, read_index
from .writer import new_file, write_tensors

if TYPE_CHECKING:
    from ..models.base import PretrainedModel


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is at its name whole or not at all."""
    with new_file(path) as file:
        file.write(content)


def save_model(model: PretrainedModel, folder: Path, max_shard_size: int | str) -> None:
    """See `PretrainedModel.save_pretrained`."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; give a folder to save the model in")
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(storable_state(model), folder, max_shard_size)
    saved_as = {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    model.config.replace(**saved_as).save_pretrained(folder)


def write_weights(state: dict[str, Tensor], folder: Path, max_shard_size: int | str) -> None:
    """Put tensors into a folder as the weights of a checkpoint, in place of those that are there.

    New weights are written under temporary names; only when all are complete do they take the place
    of the old ones, and files of the old checkpoint that the new one has no more are deleted.
    """
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    stale = _weight_files(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as staging:
        for name, keys in split.filename_to_tensors.items():
            write_tensors(Path(staging) / name, {key: state[key] for key in keys})
        for name in split.filename_to_tensors:
            os.replace(Path(staging) / name, folder / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_atomically(folder / INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    current = set(split.filename_to_tensors) | ({INDEX} if split.is_sharded else set())
    for name in stale - current:
        (folder / name).unlink(missing_ok=True)


def storable_state(model: PretrainedModel) -> dict[str, Tensor]:
    """The state dict with each tied parameter once, under its owner's name.

    A model whose config ties nothing keeps both names, since upstream then reads both.
    """
    state: dict[str, Tensor] = model.state_dict()
    for alias in model.tied():
        tensor = state.pop(alias)
        if not model.config.tie_word_embeddings:
            state[alias] = tensor.clone()
    return state


def _weight_files(folder: Path) -> set[str]:
    """Names of the weight files of the checkpoint in a folder."""
    index = folder / INDEX
    shards = set(read_index(index).values()) | {INDEX} if index.is_file() else set()
    return shards | ({WEIGHTS} if (folder / WEIGHTS).is_file() else set())
