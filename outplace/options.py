"""What the commands that run an ESM share: which checkpoint, where and in what precision."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from .models.esm import EsmPreTrainedModel, EsmTokenizer

    M = TypeVar("M", bound=EsmPreTrainedModel)

DTYPES = ("float32", "bfloat16", "float16", "float64")

_DISPENSABLE = ("contact_head.", "rotary_embeddings.inv_freq")
"""What a checkpoint may lack: a head that is not used, and values that are known without it."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, `--device` and `--dtype`."""
    parser.add_argument(
        "--model",
        default="nano",
        metavar="NAME",
        help="a repository of the Hub such as facebook/esm2_t33_650M_UR50D, a folder, or nano, the small "
        "model that comes with this package and shows how things work (default: nano)",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, …; auto takes an accelerator if there is one"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="of the weights and the results (default: float32)"
    )


def add_hub_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which files of a repository are meant; `hub_options` reads them."""
    group = parser.add_argument_group(
        "repositories of the Hub",
        "a private one needs a login: `hf auth login`, or HF_TOKEN in the environment",
    )
    group.add_argument("--revision", metavar="NAME", help="a branch, a tag or a commit (default: main)")
    group.add_argument("--subfolder", metavar="NAME", help="where in the repository or folder the files are")
    group.add_argument("--cache-dir", metavar="FOLDER", help="instead of the Hub's cache in HF_HOME")
    group.add_argument("--local-files-only", action="store_true", help="use the cache and ask nothing")


def hub_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `from_pretrained` from the options of `add_hub_options`."""
    return {
        "revision": args.revision,
        "subfolder": args.subfolder,
        "cache_dir": args.cache_dir,
        "local_files_only": args.local_files_only,
    }


def load(model_class: type[M], args: argparse.Namespace, **overrides: Any) -> tuple[M, EsmTokenizer]:
    """The model and tokenizer that the options name; `overrides` go to `from_pretrained`.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: no such device, another family's checkpoint, or one without weights that are needed.
    """
    from .models.esm import EsmTokenizer
    from .weights import CheckpointError, nano

    device = resolve_device(args.device)
    name = nano.path() if args.model == "nano" else args.model
    # Most of what it warns of is a head that is not used; what matters is an error below.
    logging.getLogger("outplace.weights").setLevel(logging.ERROR)
    tokenizer = EsmTokenizer.from_pretrained(name)
    model = model_class.from_pretrained(name, dtype=args.dtype, device=device, **overrides)
    assert model.load_report is not None
    missing = [m for m in model.load_report.missing if not any(part in m for part in _DISPENSABLE)]
    if missing:
        raise CheckpointError(
            f"{args.model} lacks {len(missing)} weights of {model_class.__name__}, among them {missing[0]}"
        )
    return model, tokenizer


def resolve_device(name: str) -> torch.device:
    """The device of that name; of "auto" the accelerator, or the CPU where there is none.

    Raises:
        ValueError: it does not exist, or not on this machine.
    """
    import torch

    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without it
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}") from error
    return device
