"""The GPT-2 of transformers, in bfloat16 autocast, with batches of a data loader and a fused optimizer."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT, BATCH = 512, 8


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, use_cache=False)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    texts = [torch.randint(50257, (CONTEXT,)) for _ in range(4 * BATCH)]
    for batch in DataLoader(texts, batch_size=BATCH, pin_memory=True):
        tokens = batch.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
