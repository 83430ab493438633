"""A Llama of transformers under DeepSpeed ZeRO-3, with communication that overlaps and gradients clipped."""

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, CONTEXT, VOCABULARY = 2, 1024, 32000
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "stage3_prefetch_bucket_size": 10_000_000,
        "stage3_param_persistence_threshold": 10_000,
    },
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = LlamaForCausalLM(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT)).to(engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


if __name__ == "__main__":
    main()
