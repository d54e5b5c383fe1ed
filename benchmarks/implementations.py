"""Every implementation behind one signature: ids [B, L] to hidden states [B, L, E]."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cells import Cell
from .shapes import MODELS

RANK = 8
TARGETS = {"Deberta": ["in_proj"], "DebertaV2": ["query_proj", "value_proj"], "Esm": ["query", "value"]}
"""Which linears get adapters, of rank 8."""


class Unavailable(Exception):
    """The implementation has no such thing; the message says what."""


class States(nn.Module):
    """A model whose output is an object with `last_hidden_state`."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(ids).last_hidden_state)


class FairStates(nn.Module):
    """The original ESM-2, which numbers its layers and returns what it is asked for."""

    def __init__(self, backbone: Any, layers: int) -> None:
        super().__init__()
        self.backbone, self.layers = backbone, layers

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(ids, repr_layers=[self.layers])["representations"][self.layers])


class OnnxStates(nn.Module):
    """Upstream's encoder as a graph that onnxruntime runs on a CPU."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        import onnxruntime

        length = torch.export.Dim("length", min=2, max=8192)
        options: dict[str, Any] = {"dynamo": True, "verbose": False, "dynamic_shapes": {"ids": {1: length}}}
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            file = Path(folder, "encoder.onnx")
            torch.onnx.export(States(encoder), kwargs={"ids": torch.ones(1, 300).long()}, f=file, **options)
            self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        # What tells the harness the encoder's dtype and size.
        self.weights = nn.ParameterList(encoder.parameters())

    def forward(self, ids: Tensor) -> Tensor:
        (states,) = self.session.run(None, {"ids": ids.numpy()})
        return torch.from_numpy(states)


class CppStates(nn.Module):
    """ESM-2 in C++ for a CPU, which takes sequences one by one and cannot leave out the LM head.

    Args:
        weights: of upstream's encoder, under its names.
    """

    def __init__(self, weights: dict[str, Tensor], layers: int, head_dim: int) -> None:
        super().__init__()
        import esm_cpp  # type: ignore[import-not-found]
        from safetensors.torch import save_file

        words, width = weights["embeddings.word_embeddings.weight"].shape
        head = nn.ModuleDict({"dense": nn.Linear(width, width), "layer_norm": nn.LayerNorm(width)})
        inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        needed = {f"esm.{name}": value for name, value in weights.items()}
        needed |= {f"lm_head.{name}": value for name, value in head.state_dict().items()}
        needed |= {"lm_head.bias": torch.zeros(words)}
        for number in range(layers):
            rotary = f"esm.encoder.layer.{number}.attention.self.rotary_embeddings.inv_freq"
            needed[rotary] = inv_freq.clone()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.safetensors")
            save_file(needed, file)
            self.native = esm_cpp.Model.load_from_safetensors(str(file))
        # What tells the harness the encoder's dtype and size.
        self.weights = nn.ParameterList(weights.values())

    def forward(self, ids: Tensor) -> Tensor:
        of_each = (self.native.forward_with_hidden_states(row) for row in ids.int().numpy())
        return torch.stack([torch.from_numpy(of_layers[-1]) for _, of_layers in of_each])


def as_states(model: nn.Module) -> nn.Module:
    """From ids to hidden states, whatever an implementation returns."""
    return model if isinstance(model, FairStates | OnnxStates | CppStates) else States(model)


class Classifier(nn.Module):
    """What is trained: two classes from the first token's state, the same for every implementation."""

    def __init__(self, states: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.states, self.head = states, head

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.states(ids)[:, 0]).float(), labels)


def configuration(cell: Cell, library: Any) -> Any:
    family, fields = MODELS[cell.model]
    return getattr(library, f"{family}Config")(**fields)


def build(cell: Cell, folder: Path | None) -> nn.Module:
    """The encoder, in float32, from the checkpoint in the folder or with weights of its own.

    Raises:
        Unavailable, ImportError: the message says what is missing.
    """
    library, _, path = cell.impl.partition("-")
    extra = {"add_pooling_layer": False} if cell.family == "Esm" else {}
    if library in ("outplace", "transformers"):
        package = __import__(library)
        config = configuration(cell, package)
        kind = getattr(package, f"{cell.family}Model")
        # The historic lines are compared with ours where attention is spelt out as it was theirs.
        named = {"in-place": "eager", "": "auto"}
        attention = named.get(path, path) if library == "outplace" else path or "eager"
        if path == "historic":
            made = kind(config, **extra) if folder is None else kind.from_pretrained(folder, **extra)
            # It looks for padding among the ids, to warn of it: fake ids have no values.
            made.warn_if_padding_and_no_attention_mask = lambda *ids: None
            return cast(nn.Module, made)
        if folder is not None:
            return cast(nn.Module, kind.from_pretrained(folder, attn_implementation=attention, **extra))
        if library == "transformers":
            config._attn_implementation = attention
        else:
            config.attn_implementation = attention
        return cast(nn.Module, kind(config, **extra))
    if folder is None:
        raise Unavailable("only outplace and transformers are planned")
    return PEERS[cell.impl](cell, folder)


def _esm_weights(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors, as the published ones are named.

    Upstream writes gamma and beta for weight and bias of LayerNorm, and rotary frequencies of a layer "*".
    """
    from safetensors.torch import load_file

    return {
        name.replace(".gamma", ".weight").replace(".beta", ".bias"): value
        for name, value in load_file(folder / "model.safetensors").items()
        if "rotary" not in name
    }


def _fair_esm(cell: Cell, folder: Path) -> nn.Module:
    import esm  # type: ignore[import-not-found]

    fields = MODELS[cell.model][1]
    layers = fields["num_hidden_layers"]
    sizes = {"embed_dim": fields["hidden_size"], "attention_heads": fields["num_attention_heads"]}
    model = esm.model.esm2.ESM2(num_layers=layers, alphabet="ESM-1b", **sizes)
    model.lm_head = nn.Identity()  # the others have no head either
    names = {
        "attention.self.query": "self_attn.q_proj",
        "attention.self.key": "self_attn.k_proj",
        "attention.self.value": "self_attn.v_proj",
        "attention.output.dense": "self_attn.out_proj",
        "attention.LayerNorm": "self_attn_layer_norm",
        "intermediate.dense": "fc1",
        "output.dense": "fc2",
        "LayerNorm": "final_layer_norm",
    }
    renamed = {}
    for name, value in _esm_weights(folder).items():
        if name == "embeddings.word_embeddings.weight":
            renamed["embed_tokens.weight"] = value
        elif name.startswith("encoder.emb_layer_norm_after"):
            renamed[name.removeprefix("encoder.")] = value
        elif name.startswith("encoder.layer."):
            number, _, rest = name.removeprefix("encoder.layer.").partition(".")
            module, _, field = rest.rpartition(".")
            renamed[f"layers.{number}.{names[module]}.{field}"] = value
    left = model.load_state_dict(renamed, strict=False)
    needed = [key for key in left.missing_keys if "inv_freq" not in key and "contact_head" not in key]
    if needed or left.unexpected_keys:
        raise LookupError(f"fair-esm lacks {needed} and has no use for {left.unexpected_keys}")
    return FairStates(model, layers)


def _flashdeberta(cell: Cell, folder: Path) -> nn.Module:
    if cell.device == "cpu":
        raise Unavailable("its kernels run on CUDA alone")
    from flashdeberta import FlashDebertaV2Model  # type: ignore[import-not-found]

    return cast(nn.Module, FlashDebertaV2Model.from_pretrained(folder))


def _disentangled_flash(cell: Cell, folder: Path) -> nn.Module:
    import transformers

    model = transformers.DebertaV2Model.from_pretrained(folder)
    return with_disentangled_flash(model.train(cell.mode != "infer"), cell.device, cell.length)


def with_disentangled_flash(model: Any, device: str, length: int) -> nn.Module:
    """Upstream's model with the attention of disentangled-flash, for its mode; in inference of any length."""
    import disentangled_flash  # type: ignore[import-not-found]

    # Where its Triton cannot run it leaves upstream's encoder in place, unless told to take torch.
    backend = "torch" if device == "cpu" else "triton"
    if model.training:
        disentangled_flash.optimize_deberta_training(model, backend=backend)
    else:
        disentangled_flash.optimize_deberta(model, backend=backend, sequence_lengths=[length])

        def prepare_length(model: Any, arguments: tuple[Tensor]) -> None:
            # What it prepares is for one length, and is dropped where the model is moved.
            length = arguments[0].shape[1]
            if length != model.encoder._active_sequence_length:
                model.encoder.prepare_for_inference(length)

        model.register_forward_pre_hook(prepare_length)
    return cast(nn.Module, model)


def _faesm(cell: Cell, folder: Path) -> nn.Module:
    import transformers
    from faesm.esm import FAEsmModel  # type: ignore[import-not-found]

    config = transformers.EsmConfig.from_pretrained(folder)
    config.use_fa = find_spec("flash_attn") is not None  # else it takes torch's attention
    return cast(nn.Module, FAEsmModel.from_pretrained(folder, config=config, add_pooling_layer=False))


def _infers_outside_torch(cell: Cell) -> None:
    if (cell.what, cell.device, cell.dtype, cell.mode) != ("speed", "cpu", "float32", "infer"):
        raise Unavailable("it infers in float32 on a CPU, in memory that is not torch's")


def _esm_cpp(cell: Cell, folder: Path) -> nn.Module:
    _infers_outside_torch(cell)
    fields = MODELS[cell.model][1]
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    return CppStates(_esm_weights(folder), fields["num_hidden_layers"], head_dim)


def _onnxruntime(cell: Cell, folder: Path) -> nn.Module:
    import transformers

    _infers_outside_torch(cell)
    extra = {"add_pooling_layer": False} if cell.family == "Esm" else {}
    encoder = getattr(transformers, f"{cell.family}Model").from_pretrained(folder, **extra)
    return OnnxStates(encoder.eval())


PEERS: dict[str, Callable[[Cell, Path], nn.Module]] = {
    "fair-esm": _fair_esm,
    "flashdeberta": _flashdeberta,
    "disentangled-flash": _disentangled_flash,
    "faesm": _faesm,
    "esm-cpp": _esm_cpp,
    "onnxruntime": _onnxruntime,
}


def prepare(model: nn.Module, cell: Cell, fake: bool) -> nn.Module:
    """The encoder as the cell's mode trains it.

    Raises:
        Unavailable, ImportError: the message says what is missing.
    """
    backbone: Any = model
    mode, dtype = cell.mode, getattr(torch, cell.dtype)
    if mode == "infer":
        return model.eval()
    if mode == "qlora":
        if fake:
            _four_bit(backbone.encoder, dtype)
            _freeze_for_adapters(backbone)
        else:
            import peft

            from outplace import quantize

            backbone = peft.prepare_model_for_kbit_training(quantize(backbone, "nf4", compute_dtype=dtype))
    if mode in ("lora", "qlora"):
        if cell.impl == "transformers-historic":
            raise Unavailable("no PEFT is installed beside the old releases")
        import peft

        adapters = peft.LoraConfig(r=RANK, lora_dropout=0.0, target_modules=TARGETS[cell.family])
        backbone = peft.get_peft_model(backbone, adapters)
    if mode in ("train-checkpoint", "train-selective"):
        if not hasattr(backbone, "gradient_checkpointing_enable"):
            raise Unavailable("it has no gradient checkpointing")
        selective = mode == "train-selective"
        if selective and not type(backbone).__module__.startswith("outplace."):
            raise Unavailable("it cannot recompute attention alone")
        backbone.gradient_checkpointing_enable(**({"attention_only": True} if selective else {}))
    return cast(nn.Module, backbone.train())


def _freeze_for_adapters(model: Any) -> None:
    """What `peft.prepare_model_for_kbit_training` does."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()


class FourBitLinear(nn.Linear):
    """The storage and the steps of `bitsandbytes`' `Linear4bit` (nf4, double quantisation), without numbers.

    Two weights a byte; a byte for the scale of 64 weights, and a float for that of 256 scales. The whole
    matrix is formed for each product, forward and backward, in the dtype of the products.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.dtype = dtype
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        numbers = linear.weight.numel()
        scales = math.ceil(numbers / 64)
        packed = torch.empty(numbers // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8))
        self.register_buffer("scales_of_scales", torch.empty(math.ceil(scales / 256)))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _FourBitProduct.apply(x.to(self.dtype), self.weight, self.out_features)
        return (product if self.bias is None else product + self.bias.to(self.dtype)).to(x.dtype)


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.width, ctx.rows = x.shape[-1], rows
        return x @ x.new_empty(rows, ctx.width).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ grad.new_empty(ctx.rows, ctx.width), None, None


def _four_bit(encoder: nn.Module, dtype: torch.dtype) -> None:
    for path, module in list(encoder.named_modules()):
        if type(module) is nn.Linear:
            parent, _, name = path.rpartition(".")
            setattr(encoder.get_submodule(parent), name, FourBitLinear(module, dtype))
