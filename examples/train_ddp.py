"""Train a classifier on random data: `torchrun --nproc-per-node 2 examples/train_ddp.py [FOLDER]`."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outplace


def train() -> outplace.DebertaV2ForSequenceClassification:
    torch.manual_seed(0)
    config = outplace.DebertaV2Config(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    )
    model = outplace.DebertaV2ForSequenceClassification(config).train()
    ids = torch.randint(5, 100, (64, 16))
    data = TensorDataset(ids, ids[:, 0] % 2)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=3e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for input_ids, labels in DataLoader(data, batch_size=8, sampler=sampler):
            loss = replica(input_ids=input_ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" where each process has a GPU of its own
    trained = train()
    if dist.get_rank() == 0 and len(sys.argv) > 1:
        trained.save_pretrained(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
