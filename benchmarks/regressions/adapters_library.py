"""A method of the Adapters library, trained through its plug-in interface with checkpointing on.

Usage: PACKAGE FAMILY METHOD, where PACKAGE holds the model classes; `outplace.transformers` stands for those
of transformers on our blocks.

The library reads a class attribute of the configuration that only upstream's have, and gives a model
with a head a signature that no forward pass with keyword-only arguments can have. Hence the two lines
for ours: an empty `attribute_map`, and `adapters.init` on the model below the head.
"""

import importlib
import sys
from contextlib import nullcontext

import adapters
import torch
from adapters.context import ForwardContext

package, family, method = sys.argv[1:]
if package == "outplace.transformers":
    importlib.import_module(package).install()
    package = "transformers"
models = importlib.import_module(package)
Config = getattr(models, f"{family}Config")
shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
if family == "Esm":
    shape |= {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"}
else:
    shape |= {"vocab_size": 60, "type_vocab_size": 0, "relative_attention": True, "embedding_size": 32}
    shape |= {"pos_att_type": ["c2p", "p2c"]}
projections = {
    "Deberta": {"attn_qkv_proj": "self.in_proj"},
    "DebertaV2": {f"attn_{x[0]}_proj": f"self.{x}_proj" for x in ("query", "key", "value")},
    "Esm": {f"attn_{x[0]}_proj": f"self.{x}" for x in ("query", "key", "value")},
}[family]
interface = adapters.AdapterModelInterface(
    adapter_methods=["bottleneck", "lora", "reft", "invertible"],
    model_embeddings="embeddings.word_embeddings" if family == "Esm" else "embeddings",
    model_layers="encoder.layer",
    layer_self_attn="attention",
    layer_cross_attn=None,
    attn_o_proj="output.dense",
    layer_intermediate_proj="intermediate.dense",
    layer_output_proj="output.dense",
    **projections,
)


def recomputed_alike() -> tuple[object, object]:
    """The library keeps what a forward pass needs in a context, which has ended in backward."""
    return nullcontext(), ForwardContext.get_context()


torch.manual_seed(0)
if package == "outplace":
    Config.attribute_map = {}
    model = getattr(models, f"{family}ForSequenceClassification")(Config(**shape))
    adapted = model.base_model
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputed_alike})
else:
    model = getattr(models, f"{family}ForSequenceClassification")(Config(**shape))
    adapted = model
adapters.init(adapted, interface=interface)
adapted.add_adapter("task", config=method)
adapted.train_adapter("task")
if package != "outplace":
    model.gradient_checkpointing_enable()
model.train()

ids = torch.randint(4, 24, (4, 10))
labels = torch.tensor([0, 1, 1, 0])
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
losses = []
for _ in range(6):
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
    loss.backward()
    assert any(p.grad is not None for name, p in model.named_parameters() if "encoder" in name)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {len(trained)} parameters trained")
