"""LoRA by peft on a Llama of transformers in float16, its layers recomputed."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, CONTEXT, VOCABULARY = 4, 1024, 32000


def main() -> None:
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
    model = LlamaForCausalLM(shape).to(torch.float16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear")).cuda().train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT)).cuda()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
