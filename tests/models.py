"""Models people train, from their configurations, small enough to test on: each gives a loss for a batch it makes itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn
from torch.nn import functional as F

Loss = Callable[[], torch.Tensor]


def _tokens(vocabulary: int, batch: int = 2, length: int = 64) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length)).to("cuda")  # as a data loader brings it: from the host


def _hugging_face(
    cls: type, config: transformers.PretrainedConfig, attention: str, batch: Callable[[], dict[str, torch.Tensor]]
) -> tuple[nn.Module, Loss]:
    config._attn_implementation = attention
    with torch.device("cuda"):
        model = cls(config)
    model.train()
    return model, lambda: model(**batch()).loss


def llama(attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    )

    def batch() -> dict[str, torch.Tensor]:
        tokens = _tokens(1000)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones(2, 64, dtype=torch.long).cuda()}

    return _hugging_face(transformers.LlamaForCausalLM, config, attention, batch)


def gpt2(attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1000, n_positions=128)

    def batch() -> dict[str, torch.Tensor]:
        tokens = _tokens(1000)
        return {"input_ids": tokens, "labels": tokens}

    return _hugging_face(transformers.GPT2LMHeadModel, config, attention, batch)


def bert(attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=1000
    )

    def batch() -> dict[str, torch.Tensor]:
        mask = torch.ones(2, 64, dtype=torch.long)
        mask[1, 40:] = 0
        return {"input_ids": _tokens(1000), "attention_mask": mask.cuda(), "labels": torch.tensor([0, 1]).cuda()}

    return _hugging_face(transformers.BertForSequenceClassification, config, attention, batch)


def t5(attention: str = "eager") -> tuple[nn.Module, Loss]:
    config = transformers.T5Config(
        d_model=128, d_ff=256, num_layers=2, num_heads=4, d_kv=32, vocab_size=1000, decoder_start_token_id=0
    )

    def batch() -> dict[str, torch.Tensor]:
        return {"input_ids": _tokens(1000), "labels": _tokens(1000, length=32)}

    return _hugging_face(transformers.T5ForConditionalGeneration, config, attention, batch)


def vit(attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    config = transformers.ViTConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )

    def batch() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(2, 3, 64, 64).cuda(), "labels": torch.tensor([1, 2]).cuda()}

    return _hugging_face(transformers.ViTForImageClassification, config, attention, batch)


def whisper(attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    config = transformers.WhisperConfig(
        d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, vocab_size=1000, max_source_positions=100, max_target_positions=64, num_mel_bins=80, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip

    def batch() -> dict[str, torch.Tensor]:
        return {"input_features": torch.randn(2, 80, 200).cuda(), "labels": _tokens(1000, length=32)}

    return _hugging_face(transformers.WhisperForConditionalGeneration, config, attention, batch)


def mixtral(attention: str = "sdpa") -> tuple[nn.Module, Loss]:
    config = transformers.MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        num_local_experts=4,
    )

    def batch() -> dict[str, torch.Tensor]:
        tokens = _tokens(1000)
        return {"input_ids": tokens, "labels": tokens}

    return _hugging_face(transformers.MixtralForCausalLM, config, attention, batch)


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.short(x), inplace=True)


def resnet(_: str = "") -> tuple[nn.Module, Loss]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(16, 16, 1), Residual(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).cuda()  # fmt: skip
    return model, lambda: F.cross_entropy(model(torch.randn(4, 3, 64, 64).cuda()), torch.tensor([1, 2, 3, 4]).cuda())


class LSTMModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(1000, 64),
            nn.LSTM(64, 128, 2, batch_first=True, dropout=0.1),
            nn.Linear(128, 1000),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def lstm(_: str = "") -> tuple[nn.Module, Loss]:
    model = LSTMModel().cuda()

    def loss() -> torch.Tensor:
        tokens = _tokens(1000)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return model, loss
