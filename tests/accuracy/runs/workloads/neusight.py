"""One model of Hugging Face transformers, in float32 with TF32 off, as NeuSight's labels were measured: forward alone, or
forward and backward without an optimizer. The cache of the allocator is emptied before every repetition, as there; the
timed part of a repetition is what was published, and the loss between forward and backward was not timed.
"""

import argparse
import gc
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    OPTConfig,
    PretrainedConfig,
)


def build(args: argparse.Namespace) -> torch.nn.Module:
    config: PretrainedConfig
    kind: Any = AutoModelForCausalLM
    if args.model == "bert":
        config = BertConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            intermediate_size=args.inner,
            max_position_embeddings=args.context,
        )
        kind = AutoModelForPreTraining if args.train else AutoModelForSequenceClassification
    elif args.model == "gpt":
        config = GPT2Config(
            vocab_size=args.vocabulary,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            n_positions=args.context,
        )
    else:
        config = OPTConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            ffn_dim=args.inner,
            word_embed_proj_dim=args.width,
            max_position_embeddings=args.context,
        )
    config.use_cache = False  # the transformers of the time kept keys and values without copying them
    with torch.device("cuda"):
        model = kind.from_config(config, attn_implementation="eager")
    return model.train(args.train)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["bert", "gpt", "opt"], required=True)
    for name in ("layers", "width", "heads", "vocabulary", "context", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--inner", type=int)
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args()

    model = build(args)
    ids = torch.ones(args.batch, args.context, dtype=torch.int64, device="cuda")
    repetition = torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # steps nothing: says where a repetition ends
    while True:
        gc.collect()
        torch.cuda.empty_cache()
        if args.train:
            outputs = model(ids)
            logits = outputs["prediction_logits" if args.model == "bert" else "logits"]
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1))
            del outputs, logits
            loss.backward()
            del loss
        else:
            with torch.no_grad():
                model(ids)
        torch.cuda.synchronize()
        repetition.step()


if __name__ == "__main__":
    main()
