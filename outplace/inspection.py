"""`outplace inspect`: what a checkpoint holds, without loading it."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from .options import add_hub_options, hub_options

DESCRIPTION = """\
Show a checkpoint's configuration and tensors, which classes it can fill and what each would miss.
Of a repository only the headers of its weights are fetched. Pickled weights have no header: they are
read whole, and only with --allow-pickle.

example:
  outplace inspect facebook/esm2_t33_650M_UR50D"""


@dataclass(frozen=True)
class Entry:
    """A tensor as a file's header describes it; `dtype` is the format's name, such as F32."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint holds and which classes it fills",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="REPO_OR_DIR")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, tensors only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_hub_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .models.config import read_json_object
    from .weights.hub import fetch_config

    hub = hub_options(args)
    config = read_json_object(fetch_config(args.checkpoint, **hub))
    entries = read_entries(args.checkpoint, hub, args.allow_pickle)
    classes = fillable(config, entries)
    total = {
        "tensors": len(entries),
        "parameters": sum(prod(entry.shape) for entry in entries.values()),
        "bytes": sum(entry.bytes for entry in entries.values()),
    }
    if args.json:
        tensors = {name: asdict(entry) for name, entry in entries.items()}
        print(
            json.dumps({"config": config, "tensors": tensors, "total": total, "classes": classes}, indent=2)
        )
        return 0
    print("config")
    for key, value in sorted(config.items()):
        print(f"  {key}: {json.dumps(value)}")
    print("\ntensors")
    width = max(map(len, entries), default=0)
    for name, entry in entries.items():
        print(f"  {name:{width}}  {entry.dtype:4}  {entry.bytes:>13,}  {list(entry.shape)}")
    print(
        f"\n{total['tensors']:,} tensors, {total['parameters']:,} numbers, {total['bytes']:,} bytes in "
        + ", ".join(sorted({entry.file for entry in entries.values()}))
    )
    print("\nclasses")
    for name, found in classes.items():
        print(f"  {name}: {_summary(found)}")
    return 0


def _summary(found: dict[str, list[str]]) -> str:
    parts = [
        f"{what} {len(names)}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for what, names in found.items()
        if names
    ]
    return "; ".join(parts) or "complete"


def read_entries(checkpoint: str, hub: dict[str, Any], allow_pickle: bool) -> dict[str, Entry]:
    """The tensors of a checkpoint by name, sorted.

    Raises:
        FileNotFoundError: it has no weights, or only pickles, which are not allowed.
        CheckpointError: a header is damaged.
    """
    from .weights.conversions import find
    from .weights.hub import INDEX, WEIGHTS, exists, fetch, fetch_weights, local_folder, read_index

    places = [hub]
    if local_folder(checkpoint) is not None:
        places = []
    elif not (exists(checkpoint, WEIGHTS, hub) or exists(checkpoint, INDEX, hub)):
        commit = find(checkpoint, hub)
        places = [] if commit is None else [{**hub, "revision": commit}]
    for place in places:
        names = {WEIGHTS}
        if not exists(checkpoint, WEIGHTS, place) and (index := fetch(checkpoint, INDEX, **place)):
            names = set(read_index(index).values())
        found = [_remote_entries(checkpoint, name, place) for name in sorted(names)]
        return dict(sorted({key: entry for part in found for key, entry in part.items()}.items()))
    return _local_entries(*fetch_weights(checkpoint, allow_pickle=allow_pickle, **hub))


def _local_entries(paths: list[Path], weight_map: dict[str, str] | None) -> dict[str, Entry]:
    from .weights.reader import Reader

    with Reader(paths, weight_map) as reader:
        return {
            key: _entry(reader.dtype(key), reader.shape(key), (weight_map or {}).get(key, paths[0].name))
            for key in reader
        }


def _remote_entries(repo_id: str, filename: str, hub: dict[str, Any]) -> dict[str, Entry]:
    """By requests for the first bytes of the file, or from the cache where it lies there."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import SafetensorsParsingError

    from .weights import CheckpointError
    from .weights.hub import explained

    path = f"{hub['subfolder']}/{filename}" if hub.get("subfolder") else filename
    cached = try_to_load_from_cache(repo_id, path, cache_dir=hub["cache_dir"], revision=hub["revision"])
    if isinstance(cached, str):
        return _local_entries([Path(cached)], None)
    with explained(f"fetch the header of {path} of {repo_id}", hub["revision"]):
        try:
            header = HfApi().parse_safetensors_file_metadata(repo_id, path, revision=hub["revision"])
            return {
                key: _entry(info.dtype, tuple(info.shape), filename) for key, info in header.tensors.items()
            }
        # The client takes for granted that what is JSON is a header, too.
        except (SafetensorsParsingError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} of {repo_id} is not a whole safetensors file: {error}") from error


def _entry(dtype: str, shape: tuple[int, ...], file: str) -> Entry:
    bits = re.search(r"\d+", dtype)  # F32, BF16, F8_E4M3; BOOL has none and takes a byte
    return Entry(dtype, shape, prod(shape) * (int(bits[0]) if bits else 8) // 8, file)


def fillable(config: dict[str, Any], entries: dict[str, Entry]) -> dict[str, dict[str, list[str]]]:
    """For each class of the checkpoint's family the names that would be missing, and what it has no use for.

    Tensors of a wrong shape are among the missing, with both shapes.
    """
    import torch

    import outplace

    from .automatic import class_names, family
    from .weights.loading import LoadReport, match

    found = {}
    for class_name in class_names(family(config)):
        cls = getattr(outplace, class_name)
        with torch.device("meta"):
            model = cls(cls.config_class.from_dict(config, **cls.config_overrides_for(set(entries))))
        shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        report = LoadReport()
        source = match(model, entries, shapes, report)
        filled = {name for name, key in source.items() if entries[key].shape == shapes[name]}
        unfit = {
            f"{name} {list(shapes[name])}, which is {list(entries[key].shape)} there"
            for name, key in source.items()
            if name not in filled
        }
        ties = model.ties()
        tied = {x for pair in ties.items() for x in pair if set(pair) & filled}
        missing = set(shapes) - set(source) - tied
        found[class_name] = {"missing": sorted(missing | unfit), "unexpected": sorted(report.unexpected)}
    return found
