"""ESM-2 with every linear but the decoder in 4 bits (QLoRA), whose outputs are views.

Usage: PACKAGE FAMILY, where PACKAGE holds the model classes.
"""

import importlib
import sys

import bitsandbytes
import torch

package, family = sys.argv[1:]
models = importlib.import_module(package)
config = getattr(models, f"{family}Config")(
    vocab_size=33,
    pad_token_id=1,
    mask_token_id=32,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    hidden_dropout_prob=0.0,
    position_embedding_type="rotary",
    token_dropout=True,
)
model = getattr(models, f"{family}ForMaskedLM")(config)
for path, linear in list(model.named_modules()):
    if type(linear) is not torch.nn.Linear or path.endswith("decoder"):
        continue
    shape = (linear.in_features, linear.out_features)
    four_bit = bitsandbytes.nn.Linear4bit(*shape, compute_dtype=torch.float32, quant_type="nf4")
    four_bit.weight = bitsandbytes.nn.Params4bit(
        linear.weight.detach(), requires_grad=False, quant_type="nf4"
    )
    four_bit.bias = linear.bias
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, four_bit.to("cpu"))

ids = torch.randint(4, 24, (2, 10))
loss = model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
loss.backward()
gradients = [p.grad for p in model.parameters() if p.grad is not None]
assert gradients
assert all(gradient.isfinite().all() for gradient in gradients)
print(f"loss {loss.item():.4f}, gradients of {len(gradients)} parameters")
