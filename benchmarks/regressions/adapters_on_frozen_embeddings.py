"""LoRA with `enable_input_require_grads`, which gradient checkpointing of a frozen model needs.

Usage: PACKAGE FAMILY, where PACKAGE holds the model classes.
"""

import importlib
import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model

package, family = sys.argv[1:]
models = importlib.import_module(package)
config = getattr(models, f"{family}Config")(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    type_vocab_size=0,
)
model = getattr(models, f"{family}ForSequenceClassification")(config)
model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_dropout=0.1)).train()
model.enable_input_require_grads()

ids = torch.randint(4, 60, (2, 10))
loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1])).loss
loss.backward()
adapters = [p for name, p in model.named_parameters() if "lora_" in name]
assert adapters
assert all(p.grad is not None and p.grad.isfinite().all() for p in adapters)
print(f"loss {loss.item():.4f}, gradients of {len(adapters)} adapters")
