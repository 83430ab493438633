"""nn.TransformerEncoder in float32 with dropout, over sequences that are padded, and a masked language model's loss."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, TOKENS, VOCABULARY, BATCH = 1024, 16, 2, 512, 30522, 8


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(TOKENS, device=tokens.device))
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def main() -> None:
    torch.manual_seed(0)
    model = Encoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        tokens = torch.randint(1, VOCABULARY, (BATCH, TOKENS)).cuda()
        loss = torch.zeros((), device="cuda")
        for padding in (None, torch.arange(TOKENS, device="cuda").expand(BATCH, -1) >= TOKENS - 64):
            loss = loss + F.cross_entropy(model(tokens, padding).flatten(0, 1), tokens.flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
