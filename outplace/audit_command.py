"""`outplace audit MODEL`: does a model write to its tensors?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .models.config import PretrainedConfig

_SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_DEBERTA = _SHAPE | {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "max_relative_positions": 8,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "Deberta": _DEBERTA | {"talking_head": True},
    "DebertaV2": _DEBERTA | {"position_buckets": 4, "conv_kernel_size": 3, "norm_rel_ebd": "layer_norm"},
    "Esm": _SHAPE
    | {
        "vocab_size": 33,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "max_position_embeddings": 32,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "emb_layer_norm_before": True,
    },
}
"""For each family, a small configuration with all that can be switched on together."""


def add_parser(subparsers: Any) -> None:
    """Add `audit` to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "audit",
        help="find every in-place write of a model",
        description="Run a model forward and backward on random input and list every write it makes to a "
        "tensor that existed before. The exit status is 1 if there is one.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a Hub repository, nano, or a class for a tiny random model"
    )
    parser.add_argument(
        "--class", dest="class_name", metavar="NAME", help="of a checkpoint; its own unless given"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--train", dest="modes", action="store_const", const=(True,), help="in training mode only"
    )
    mode.add_argument("--eval", dest="modes", action="store_const", const=(False,), help="in eval mode only")
    parser.add_argument(
        "--upstream", action="store_true", help="audit the class of that name in transformers"
    )
    parser.add_argument("--attn-implementation", metavar="NAME", help="auto, eager or sdpa")
    parser.add_argument(
        "--checkpointing",
        choices=("none", "reentrant", "non-reentrant"),
        default="none",
        help="in training mode",
    )
    parser.set_defaults(run=run, modes=(False, True))


def run(args: argparse.Namespace) -> int:
    """Print a table for each mode. Returns 1 if the model writes, else 0.

    Raises:
        ValueError: the class is none of ours, or not given where the checkpoint does not say.
        FileNotFoundError: no such folder or repository.
    """
    from .auditor import audit

    model, config = build(args.model, args.class_name, args.upstream, args.attn_implementation)
    inputs = random_inputs(type(model).__name__, config)
    clean = True
    for training in args.modes:
        model.train(training)
        if training and args.checkpointing != "none":
            options = {"use_reentrant": args.checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        report = audit(model, **inputs)
        print(f"[{'train' if training else 'eval'}] {report}")
        clean = clean and report.clean
    return 0 if clean else 1


def family_of(class_name: str) -> str:
    """The prefix of a model class. Raises `ValueError` where no class of ours has that name."""
    import outplace

    families = [family for family in TINY if class_name.startswith((f"{family}Model", f"{family}For"))]
    if class_name not in outplace.__all__ or not families:
        known = [name for name in outplace.__all__ if name.startswith(tuple(TINY)) and "For" in name]
        raise ValueError(
            f"{class_name!r} is no model class here; there are, and their bases: {', '.join(known)}"
        )
    return families[0]


def build(
    name: str, class_name: str | None, upstream: bool, attn_implementation: str | None
) -> tuple[nn.Module, PretrainedConfig]:
    """The model, and the configuration it has here, whosever it is."""
    import outplace

    library: Any = outplace
    if upstream:
        import transformers

        library = transformers
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if name in outplace.__all__:
        family = family_of(name)
        config = getattr(outplace, f"{family}Config")(**TINY[family])
        its_config = getattr(library, f"{family}Config")(**TINY[family])
        model_class = getattr(library, name)
        make = model_class._from_config if upstream else model_class
        return make(its_config, **attention), config
    folder = _nano_folder() if name == "nano" else name
    class_name = class_name or _class_of(folder)
    config = getattr(outplace, f"{family_of(class_name)}Config").from_pretrained(folder)
    return getattr(library, class_name).from_pretrained(folder, **attention), config


def _nano_folder() -> Path:
    from .weights import nano

    assert nano.__file__ is not None
    return Path(nano.__file__).parent


def _class_of(folder: str | Path) -> str:
    """The model class that a checkpoint's `config.json` names."""
    from .models.config import read_json_object
    from .weights.hub import fetch_config

    names = read_json_object(fetch_config(folder)).get("architectures") or []
    if not names:
        raise ValueError(f"the config.json of {folder} names no architecture; choose one by --class")
    return str(names[0])


def random_inputs(class_name: str, config: PretrainedConfig) -> dict[str, Any]:
    """Two sequences, one of them padded, with masked tokens and labels for the class's head."""
    import torch

    batch, length, vocabulary = 2, 12, config.vocab_size  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, vocabulary, (batch, length), generator=generator)
    columns = torch.arange(length)
    real = columns < torch.tensor([[length], [length - 3]])
    mask_token = getattr(config, "mask_token_id", None)
    if mask_token is not None:
        ids = torch.where(columns == 2, mask_token, ids)
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = (columns >= length // 2).long().expand(batch, length)
    if class_name.endswith("ForMultipleChoice"):
        inputs = {name: torch.stack((value, value.flip(0)), dim=1) for name, value in inputs.items()}
    return inputs | _labels(class_name, config, inputs["input_ids"])


def _labels(class_name: str, config: PretrainedConfig, ids: Tensor) -> dict[str, Tensor]:
    import torch

    rows, labels = torch.arange(len(ids)), int(config.num_labels or 1)
    if class_name.endswith("ForMaskedLM"):
        return {"labels": ids}
    if class_name.endswith("ForTokenClassification"):
        return {"labels": ids % labels}
    if class_name.endswith("ForQuestionAnswering"):
        return {"start_positions": rows, "end_positions": rows + 2}
    if class_name.endswith("ForMultipleChoice"):
        return {"labels": rows % ids.shape[1]}
    if class_name.endswith("ForSequenceClassification"):
        if labels == 1:
            return {"labels": torch.ones(len(ids))}
        if config.problem_type in ("regression", "multi_label_classification"):
            return {"labels": torch.ones(len(ids), labels)}
        return {"labels": rows % labels}
    return {}
