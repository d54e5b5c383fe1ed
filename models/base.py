"""What every model here is: built from a configuration, loaded and saved, initialised, checkpointed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..weights.loading import LoadReport, load_checkpoint
from ..weights.renames import Rename
from .attention import masks, runs_plainly
from .attention.plan import AttentionPlan, choose
from .config import Pack, PretrainedConfig
from .layers import Checkpointing, LayerStack
from .losses import IGNORE
from .outputs import ModelOutput
from .packing import Layout, Needs, Row, Sequences, find_row, has_hooks

if TYPE_CHECKING:
    from .tokenization import Tokenizer

M = TypeVar("M", bound="PretrainedModel")
Output = TypeVar("Output", bound=ModelOutput)


class PretrainedModel(nn.Module):
    """Base of all models.

    Args:
        config: read, and never written to.
        attn_implementation: as `config.attn_implementation`, which it overrides for this model.
    """

    config_class: ClassVar[type[PretrainedConfig]]
    base_model_prefix: ClassVar[str]
    renames: ClassVar[tuple[Rename, ...]]
    """How keys of older checkpoints are called here; see `weights.renames`."""
    supports_gradient_checkpointing: ClassVar[bool] = True
    main_input_name: ClassVar[str] = "input_ids"

    def __init__(self, config: PretrainedConfig, attn_implementation: str | None = None) -> None:
        super().__init__()
        if attn_implementation is not None and attn_implementation != config.attn_implementation:
            config = config.replace(attn_implementation=attn_implementation)
        self.config = config
        self.load_report: LoadReport | None = None

    def post_init(self) -> None:
        """Initialise what the base model has not yet, and tie. The last line of each model's constructor."""
        base = f"{self.base_model_prefix}."
        own = {name for name, _ in self.named_parameters() if not name.startswith(base)}
        initialize(self, self.config.initializer_range, only=own)
        self.tie_weights()

    @property
    def settings(self) -> Any:
        """What forward passes read of the configuration; `outplace.transformers` reads upstream's."""
        return self.config

    def option(self, name: str, given: bool | None) -> bool:
        """An argument of a forward pass, or the configuration's where none is given."""
        return bool(getattr(self.settings, name) if given is None else given)

    def attention_plan(self, batch: int, length: int, output_attentions: bool | None = None) -> AttentionPlan:
        """Which attention a forward pass over `batch` sequences of `length` tokens would take here and now.

        Args:
            output_attentions: the configuration's unless given.

        Raises:
            ValueError: `config.attn_implementation` names a path that cannot do it.
        """
        wanted = self.option("output_attentions", output_attentions)
        return choose(self.settings, batch, length, self.device, wanted, self.dtype)

    def returned(self, output: Output, return_dict: bool | None) -> Output | tuple[Any, ...]:
        """The output as the caller, or else the configuration, wants it."""
        return output if self.option("return_dict", return_dict) else output.to_tuple()

    # How tokens lie

    def layout(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        pack: Pack | None,
        output_attentions: bool,
        needs: Needs | None = None,
    ) -> Layout:
        """How the tokens of a forward pass lie: in a row where the caller gave one or that saves padding.

        Which cells are padding is read from the mask's values, here and nowhere else, and only where
        operators run plainly. Under "auto" a batch is packed where `may_pack` says so of the device,
        enough of it is padding (`packing.FULL`, `packing.PADDING`), nothing that is returned for a token
        or a sequence depends on padding, and no hooks watch the modules, which are to see whole batches.

        Args:
            cu_seqlens: where the sequences of a row begin, and its length, [B + 1].
            pack: the configuration's unless given. Says nothing where `cu_seqlens` is given.
            needs: what the model reads of padding.

        Raises:
            ValueError: a malformed input or mask, or `pack` is True where something stands against it.
        """
        batch, length, device = resolve_input(input_ids, inputs_embeds)
        pack, needs = self.settings.pack if pack is None else pack, needs or Needs()
        mask = self.resolve_mask(input_ids, masks.as_bool(attention_mask, batch, length))
        if cu_seqlens is not None:
            return self._given_row(Sequences.of(cu_seqlens, batch, length), input_ids, mask, position_ids)
        padded = Layout(batch, length, mask, position_ids)
        if pack is False or mask is None or (pack == "auto" and not self.may_pack(device)):
            return padded
        row: Row | str | None = None
        if mask.ndim == 3:
            row = "attention_mask [B, L, L] has no padding"
        elif output_attentions:
            row = "attention weights are asked for"
        elif not runs_plainly(device):
            row = "it is traced, compiled, exported or transformed; cu_seqlens can be given there"
        elif needs.all is not None:
            row = needs.all
        else:
            counted = [] if needs.labels is None else [needs.labels != IGNORE]
            if self.counted_token is not None and input_ids is not None:
                counted = [*counted, torch.as_tensor(input_ids == self.counted_token)]
            row = find_row(mask, needs.first, counted, asked=pack is True)
        if isinstance(row, str) and pack is True:
            raise ValueError(f"pack=True, but {row}")
        if not isinstance(row, Row) or (pack == "auto" and has_hooks(self, but=_require_grad)):
            return padded
        if position_ids is None:
            position_ids = self.default_positions(input_ids, length, device)
        sequences = Sequences.of(row.cu_seqlens, 1, row.cells.shape[0])
        packed = Layout(batch, length, None, None, sequences, row.cells, row.starts)
        mask = packed.row(mask) if row.holes else None
        return replace(packed, mask=mask, position_ids=packed.row(position_ids))

    def may_pack(self, device: torch.device) -> bool:
        """Return True if "auto" packs with this configuration on this device."""
        spelt_out = self.settings.attn_implementation == "eager"
        return not spelt_out and (device.type == "cpu" or self.packs_on(device))

    def packs_on(self, device: torch.device) -> bool:
        """Return True if a kernel takes packed sequences on this device, which is no CPU."""
        return False

    def _given_row(
        self, sequences: Sequences, input_ids: Tensor | None, mask: Tensor | None, position_ids: Tensor | None
    ) -> Layout:
        """The layout of a row that the caller gave.

        Raises:
            ValueError: the mask is not [1, total].
        """
        total, starts = sequences.total, sequences.cu_seqlens[:-1]
        if mask is not None and mask.ndim == 3:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; with cu_seqlens it must be {(1, total)}"
            )
        if position_ids is None:
            position_ids = self.default_positions(input_ids, sequences.longest, starts.device, sequences)
        if sequences.lengths is None:
            starts = starts.clamp(max=total - 1)
        elif mask is not None and mask.all():
            mask = None
        return Layout(1, total, mask, position_ids, sequences, starts=starts)

    @property
    def counted_token(self) -> int | None:
        """A token that counts on padding too."""
        return None

    def resolve_mask(self, input_ids: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """The mask of an input that came with this one; a family may tell padding by the ids."""
        return mask

    def default_positions(
        self,
        input_ids: Tensor | None,
        length: int,
        device: torch.device,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Positions unless given, [1 or B, L], or [1, total] of the sequences of a row.

        Args:
            length: of the longest sequence.

        Raises:
            ValueError: an absolute position table has fewer rows than that.
        """
        return counted(length, device, sequences)

    # Loading and saving

    @classmethod
    def from_pretrained(
        cls: type[M],
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        config: PretrainedConfig | None = None,
        attn_implementation: str | None = None,
        strict: bool = False,
        allow_pickle: bool = False,
        **config_overrides: Any,
    ) -> M:
        """The model of a checkpoint, in eval mode.

        Parameters are created without storage and filled one by one, so the model is in memory once;
        uncast ones stay mapped from the file until they are written to. `model.load_report` says what
        the file did not hold and what in it was not used; what was missing is newly initialised.

        Args:
            name_or_path: a folder, or a repository of the Hub.
            revision, subfolder, cache_dir, token, local_files_only, force_download: as in
                `huggingface_hub.hf_hub_download`.
            dtype: of all floating parameters, "auto" or None for the checkpoint's own.
            device: where the parameters go; the CPU unless given.
            config: used instead of the checkpoint's.
            strict: whether a missing or unexpected key is an error.
            allow_pickle: whether a checkpoint that has only pickles may be read, restricted to tensors;
                what they hold is written to the cache once, as safetensors. See `weights.hub.fetch_weights`
                for the order in which weights are searched for.
            config_overrides: fields of the configuration, and keywords of the model's constructor.

        Raises:
            TypeError: an override that is neither.
            FileNotFoundError: no such folder, repository or file, or only pickles, which are not allowed.
            CheckpointError: a damaged or foreign file, a tensor of the wrong shape, or, under `strict`,
                a missing or unexpected key. No model is returned half filled.
        """
        hub = {
            "revision": revision,
            "subfolder": subfolder,
            "cache_dir": cache_dir,
            "token": token,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        return load_checkpoint(
            lambda values, keys: cls,
            name_or_path,
            dtype=dtype,
            device=device,
            config=config,
            attn_implementation=attn_implementation,
            strict=strict,
            allow_pickle=allow_pickle,
            **hub,
            **config_overrides,
        )

    def save_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write `config.json` and the weights, under upstream's names, tied ones once.

        Args:
            folder: made where it does not exist. Files of the same names are replaced only once the
                new ones are complete.
            max_shard_size: bytes, or a string such as "5GB"; a larger model is split over several
                files with an index.
        """
        from ..weights.saving import save_model

        save_model(self, Path(folder), max_shard_size)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Tokenizer | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        create_pr: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Save to a repository of the Hub, in one commit, with a model card where it has none.

        Args:
            repo_id: made where it does not exist.
            tokenizer: saved with it.
            token: of the Hub; that of `hf auth login` unless given.
            private: whether a new repository is.
            revision: a branch, made where it does not exist; main unless given.
            create_pr: open a pull request instead.
            max_shard_size: as `save_pretrained`.

        Returns:
            The address of the commit or of the pull request.

        Raises:
            FileNotFoundError: the Hub refuses or cannot be reached; the message says why.
        """
        from ..weights.publishing import model_card, push

        def write(folder: Path) -> None:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

        return push(
            repo_id,
            write,
            commit_message=commit_message,
            card=model_card(self, repo_id),
            token=token,
            private=private,
            revision=revision,
            create_pr=create_pr,
        )

    @classmethod
    def config_overrides_for(cls, keys: set[str]) -> dict[str, Any]:
        """What the keys of a checkpoint say about the configuration it needs; overridden by a family."""
        return {}

    # Parts

    @property
    def base_model(self) -> nn.Module:
        """The model without its head."""
        return getattr(self, self.base_model_prefix, self)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.embeddings.word_embeddings  # type: ignore[union-attr,return-value]

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        self.base_model.embeddings.word_embeddings = embeddings  # type: ignore[union-attr]
        self.tie_weights()

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that maps to the vocabulary, where there is one of its own."""
        return None

    def vocabulary_parameters(self) -> list[str]:
        """Names of the parameters with one row a token."""
        embeddings = self.get_input_embeddings()
        return [f"{name}.weight" for name, module in self.named_modules() if module is embeddings]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None
    ) -> nn.Embedding:
        """Give the vocabulary another size, in the embeddings and in the head.

        New rows are initialised as a new model's; a head's new biases are zero. The model gets a new
        configuration, with the new `vocab_size`; the old one is left alone.

        Args:
            new_num_tokens: the current size unless given.
            pad_to_multiple_of: round the size up, for the sake of tensor cores.

        Raises:
            ValueError: a size that cuts off the padding token, or none.
        """
        embeddings = self.get_input_embeddings()
        old, padding = embeddings.num_embeddings, embeddings.padding_idx
        size = old if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size < 1 or (padding is not None and size <= padding):
            raise ValueError(
                f"a vocabulary of {size} tokens has no room for the padding token, number {padding}"
            )
        tied = self.tied()
        for name in self.vocabulary_parameters():
            if name not in tied:
                self._resize_rows(name, size)
        config = self.config.replace(vocab_size=size)
        for module in self.modules():
            if isinstance(module, PretrainedModel):
                module.config = config
        embeddings.num_embeddings = size
        head = self.get_output_embeddings()
        if isinstance(head, nn.Linear):
            head.out_features = size
        self.tie_weights(tied)
        return embeddings

    def _resize_rows(self, name: str, rows: int) -> None:
        parameter = self.get_parameter(name)
        kept = parameter.detach()[:rows]
        fresh = torch.randn(rows - len(kept), *kept.shape[1:]) * (
            self.config.initializer_range * (kept.ndim > 1)
        )
        resized = torch.cat((kept, fresh.to(kept)))
        module, _, attribute = name.rpartition(".")
        setattr(self.get_submodule(module), attribute, nn.Parameter(resized, parameter.requires_grad))

    def ties(self) -> dict[str, str]:
        """Parameters that are another one under a second name: `{name: owner}`."""
        return {}

    def tied(self) -> list[str]:
        """The names of `ties` that are their owner now: not so where values differed, or were replaced."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        ties = self.ties().items()
        return [
            name for name, owner in ties if name in parameters and parameters[name] is parameters.get(owner)
        ]

    @property
    def _keys_to_ignore_on_save(self) -> list[str]:
        """What Trainer asks when a checkpoint lacks parameters: tied ones are not missing."""
        return self.tied()

    def tie_weights(self, names: Collection[str] | None = None) -> None:
        """Make tied parameters, those of `names` or all, the same object as their owner."""
        for name, owner in self.ties().items():
            if names is None or name in names:
                module, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(module), attribute, self.get_parameter(owner))

    def _apply(self: M, fn: Any, recurse: bool = True) -> M:
        # A move between devices that cannot share storage replaces each name's parameter by its own.
        tied = self.tied()
        super()._apply(fn, recurse)
        self.tie_weights(tied)
        return self

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """How many numbers the parameters hold, tied ones counted once.

        Args:
            only_trainable: count only those that require gradients.
            exclude_embeddings: leave out the embedding tables, as `transformers.Trainer` does to
                estimate the work of a step.
        """
        tables = {
            module.weight
            for module in self.modules()
            if exclude_embeddings and isinstance(module, nn.Embedding)
        }
        return sum(
            p.numel()
            for p in self.parameters()
            if (p.requires_grad or not only_trainable) and p not in tables
        )

    # Training

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(stack.checkpointing is not None for stack in self._layer_stacks())

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *, attention_only: bool = False
    ) -> None:
        """Recompute activations in backward instead of keeping them.

        Args:
            gradient_checkpointing_kwargs: passed to `torch.utils.checkpoint.checkpoint`;
                `use_reentrant` is False unless given.
            attention_only: recompute each layer's attention but not its feed-forward: less memory is
                saved, and less time lost, than with whole layers.
        """
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        use_reentrant = options.pop("use_reentrant")
        for stack in self._layer_stacks():
            stack.checkpointing = Checkpointing(attention_only, use_reentrant, options)

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`gradient_checkpointing_enable` under the name and with the arguments that Trainer calls it by.

        Raises:
            ValueError: layers are to be left out, or activations to be moved to the host.
        """
        if every_n_layers != 1 or offload:
            raise ValueError(
                f"every_n_layers={every_n_layers}, offload={offload}: all layers are recomputed here and "
                "nothing is offloaded; gradient_checkpointing_enable(attention_only=True) recomputes less"
            )
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        for stack in self._layer_stacks():
            stack.checkpointing = None

    def _layer_stacks(self) -> list[LayerStack]:
        return [module for module in self.modules() if isinstance(module, LayerStack)]

    def enable_input_require_grads(self) -> None:
        """Make the output of the input embeddings require gradients, for adapters on frozen embeddings."""
        self.disable_input_require_grads()
        self._input_grads_hook = self.get_input_embeddings().register_forward_hook(_require_grad)

    def disable_input_require_grads(self) -> None:
        hook = self.__dict__.pop("_input_grads_hook", None)
        if hook is not None:
            hook.remove()


def _require_grad(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    output.requires_grad_(True)


@torch.no_grad()
def initialize(model: nn.Module, std: float, only: set[str] | None = None) -> None:
    """Fill parameters as upstream does: the one function of the project that writes to tensors.

    Weights of linear maps, convolutions and embeddings are drawn from N(0, std²), padding rows are
    zero, norms start as the identity, every other parameter is zero.

    Args:
        std: `config.initializer_range`.
        only: names of the parameters to fill; all of them where it is None.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if only is not None and f"{prefix}.{name}".lstrip(".") not in only:
                continue
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding) and name == "weight":
                parameter.normal_(0.0, std)
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    parameter[module.padding_idx].zero_()
            elif name == "weight" and parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.zero_()


def counted(length: int, device: torch.device, sequences: Sequences | None) -> Tensor:
    """Return positions counted from 0, [1, length], or in each sequence of a row, [1, total]."""
    if sequences is not None:
        return sequences.positions()
    return torch.arange(length, device=device).unsqueeze(0)


def resolve_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int, torch.device]:
    """Batch size, length and device of a model's input.

    Raises:
        ValueError: not exactly one of the two is given, or it has the wrong number of dimensions.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    source, name, form, ndim = (
        (input_ids, "input_ids", "[B, L]", 2)
        if input_ids is not None
        else (inputs_embeds, "inputs_embeds", "[B, L, E]", 3)
    )
    assert source is not None
    if source.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(source.shape)}; it must be {form}")
    return source.shape[0], source.shape[1], source.device
