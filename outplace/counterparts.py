"""One checkpoint run in both libraries: the same tokens, one model in memory at a time."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import outplace

from .automatic import class_names, family, load_tokenizer, model_class
from .comparison import Keys, Tokens, compare_tokens, real_values
from .models.base import PretrainedModel
from .models.config import PretrainedConfig
from .weights.loading import LoadReport, load_checkpoint

NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"
"""What keeps upstream from asking the Hub to convert a repository of pickles that it loads."""

PROSE = (
    "Paris is the {mask} of France.",
    "Dr. O'Neill paid $3.50 (about €3) at 7:45 a.m. — naïve, isn't it?",
    "Ein Satz, ещё один, そしてもう一つ; and an END in capitals.",
)
PROTEINS = ("MKTAYIAKQR{mask}ISFVKSHFSRQLEERLGLIEVQ", "LAGVSERTIDPKQNFYMHWC", "MXBUZO")


@dataclass(frozen=True)
class Settings:
    """What both libraries are told.

    Args:
        checkpoint: a folder or a repository of the Hub.
        class_name: of the model; the checkpoint's unless given.
        dtype, device: of both models.
        attn_implementation: "eager", or "sdpa" for ESM.
        attentions: whether attention weights are compared.
        allow_pickle: as `PretrainedModel.from_pretrained`.
        hub: options of the Hub by name; one that is None is left to its default.
    """

    checkpoint: str | Path
    class_name: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    attn_implementation: str = "eager"
    attentions: bool = False
    allow_pickle: bool = False
    hub: dict[str, Any] = field(default_factory=dict)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep what both libraries say of loading off the screen, and upstream from asking for a conversion."""
    own, its = logging.getLogger("outplace.weights"), transformers.logging
    before = own.level, its.get_verbosity(), its.is_progress_bar_enabled(), os.environ.get(NO_CONVERSION)
    own.setLevel(logging.ERROR)
    its.set_verbosity_error()
    its.disable_progress_bar()
    os.environ[NO_CONVERSION] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        own.setLevel(before[0])
        its.set_verbosity(before[1])
        if before[2]:
            its.enable_progress_bar()
        if before[3] is None:
            del os.environ[NO_CONVERSION]
        else:
            os.environ[NO_CONVERSION] = before[3]


# Inputs


class Inputs(NamedTuple):
    """What both models are given: ids and mask [B, L], where they are from, and what is to say of them."""

    ids: Tensor
    mask: Tensor
    source: str
    tokens: Tokens | None
    notes: list[str]


def make_inputs(
    transformers: Any, settings: Settings, config: PretrainedConfig, texts: Sequence[str] | None, source: str
) -> Inputs:
    """Tokens of this library's tokenizer, compared with upstream's; random ones where there is none.

    Raises:
        FileNotFoundError: texts, and no tokenizer.
    """
    try:
        tokenizer = load_tokenizer(settings.checkpoint, **settings.hub)
    except FileNotFoundError:
        if texts is not None:
            raise
        note = "there are no files of a tokenizer: tokens are random, and tokenizers are not compared"
        return Inputs(*_padded(_random_rows(config), config), "random tokens", None, [note])
    if texts is None:
        source = "built-in texts"
        built_in = PROTEINS if config.model_type == "esm" else PROSE
        texts = [text.format(mask=tokenizer.mask_token or "") for text in built_in]
    rows = tokenizer(list(texts))["input_ids"]
    batch = _padded(rows, config)
    try:
        other = transformers.AutoTokenizer.from_pretrained(settings.checkpoint, **_its_hub(settings))
        its_rows = other(list(texts))["input_ids"]
    except Exception as error:  # whatever upstream's files and packages make it raise
        note = f"tokenizers are not compared: transformers' fails with {_one_line(error)}"
        return Inputs(*batch, source, None, [note])
    return Inputs(*batch, source, compare_tokens(rows, its_rows, tokenizer, other), [])


def _random_rows(config: Any) -> list[list[int]]:
    """Seeded tokens, two rows of different lengths, far enough for DeBERTa's logarithmic buckets."""
    generator = torch.Generator().manual_seed(0)
    size = config.vocab_size or 1  # a model without one is refused when it is built
    first = min(4, size - 1)  # past the special tokens of each family
    lengths = (min(length, config.max_position_embeddings - 2) for length in (300, 170))
    return [torch.randint(first, size, (length,), generator=generator).tolist() for length in lengths]


def _padded(rows: Sequence[Sequence[int]], config: Any) -> tuple[Tensor, Tensor]:
    """Rows to ids [B, L], padded on the right, and the boolean mask of what is no padding."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(mask.shape, config.pad_token_id or 0)
    return ids.masked_scatter(mask, torch.tensor([i for row in rows for i in row])), mask


# The two libraries


class Ours(NamedTuple):
    """A run of this library.

    `aliases` are second names of tied parameters, `fresh` holds what the checkpoint lacked, and `legacy`
    says which masked-language head was built.
    """

    class_name: str
    outputs: dict[str, Tensor]
    report: LoadReport
    aliases: set[str]
    fresh: dict[str, Tensor]
    legacy: bool | None

    @property
    def keys(self) -> Keys:
        return Keys(sorted(set(self.report.missing) - self.aliases), self.report.unexpected)


class Theirs(NamedTuple):
    """A run of upstream; `copied` are the parameters that were given this library's values."""

    outputs: dict[str, Tensor]
    keys: Keys
    copied: list[str]


def run_ours(settings: Settings, inputs: Inputs, device: torch.device) -> Ours:
    """Load the checkpoint here, run it, and let go of it.

    Raises:
        FileNotFoundError, CheckpointError: as `PretrainedModel.from_pretrained`.
        ValueError: no such class, or inputs that the model does not take.
    """
    model = _load_ours(settings, device)
    assert model.load_report is not None
    state = model.state_dict()
    return Ours(
        type(model).__name__,
        _outputs(model, settings, inputs),
        model.load_report,
        set(model.tied()),
        {name: state[name] for name in model.load_report.missing},
        getattr(model.config, "legacy", None),
    )


def _load_ours(settings: Settings, device: torch.device) -> PretrainedModel:
    def choose(values: dict[str, Any], keys: Collection[str]) -> type[PretrainedModel]:
        if settings.class_name is None:
            return model_class(values, keys)
        known = class_names(family(values))
        if settings.class_name not in known:
            raise ValueError(f"{settings.class_name!r} is no class of the checkpoint: {', '.join(known)}")
        return getattr(outplace, settings.class_name)  # type: ignore[no-any-return]

    return load_checkpoint(
        choose,
        settings.checkpoint,
        dtype=settings.dtype,
        device=device,
        attn_implementation=settings.attn_implementation,
        allow_pickle=settings.allow_pickle,
        **settings.hub,
    )


def run_theirs(
    transformers: Any, settings: Settings, inputs: Inputs, device: torch.device, ours: Ours
) -> Theirs:
    """As `run_ours`, with upstream's class of the same name.

    Raises:
        ValueError: upstream fails; the message says how.
    """
    try:
        model, info = getattr(transformers, ours.class_name).from_pretrained(
            settings.checkpoint,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=settings.attn_implementation,
            output_loading_info=True,
            **({} if ours.legacy is None else {"legacy": ours.legacy}),
            **_its_hub(settings),
        )
        missing = set(info["missing_keys"])
        values = {name: x for name, x in ours.fresh.items() if name in missing}
        lacking = missing - values.keys()
        if lacking:
            state = _load_ours(settings, torch.device("cpu")).state_dict()
            values |= {name: state[name] for name in lacking if name in state}
        model.load_state_dict(values, strict=False)
        outputs = _outputs(model.to(device).eval(), settings, inputs)
    except Exception as error:  # upstream's failures are of any class
        raise ValueError(
            f"transformers cannot run {settings.checkpoint} as {ours.class_name} in {settings.dtype}: "
            f"{_one_line(error)}"
        ) from error
    unexpected = set(info["unexpected_keys"]) - set(ours.report.ignored)
    keys = Keys(sorted(missing - ours.aliases), sorted(unexpected))
    return Theirs(outputs, keys, sorted(values.keys() - ours.aliases))


def _outputs(model: Any, settings: Settings, inputs: Inputs) -> dict[str, Tensor]:
    ids, mask = inputs.ids.to(model.device), inputs.mask.long().to(model.device)
    if type(model).__name__.endswith("ForMultipleChoice"):
        ids, mask = ids[None], mask[None]  # the texts are the choices of one question
    with torch.inference_mode():
        output = model(
            input_ids=ids,
            attention_mask=mask,
            output_hidden_states=True,
            output_attentions=settings.attentions,
            return_dict=True,
        )
    return real_values(output, inputs.mask)


def _its_hub(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.hub.items() if value is not None}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
