"""A language model of two LSTM layers by cuDNN, with an embedding and Adam."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, TOKENS, VOCABULARY, BATCH = 1024, 2, 64, 10000, 64


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(F.dropout(self.tokens(tokens), 0.2))
        return self.head(hidden)


def main() -> None:
    torch.manual_seed(0)
    model = Lstm().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        batch = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1)).cuda()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
