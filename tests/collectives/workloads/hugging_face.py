"""Models of transformers: hugging_face.py VARIANT"""

import sys

import torch
import transformers
import transformers.masking_utils
from gpt import report, start
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

variant = sys.argv[1]
# whether sequences are packed is read from values, which a device without arithmetic does not have: they are not
transformers.masking_utils.find_packed_sequence_indices = lambda *args, **kwargs: None
start()
if variant == "gpt2_ddp":
    config = transformers.GPT2Config(attn_implementation="sdpa", use_cache=False)
    length = 1024
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(config).train()
    trained = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
else:  # Llama 7B, as it is pretrained on one node
    config = transformers.LlamaConfig(attn_implementation="sdpa", use_cache=False)
    length = 4096
    with torch.device("meta"):
        trained = transformers.LlamaForCausalLM(config).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, layer in enumerate(trained.model.layers):
        trained.model.layers[index] = checkpoint_wrapper(layer)
        fully_shard(trained.model.layers[index], mp_policy=policy)
    fully_shard(trained, mp_policy=policy)
    trained.to_empty(device="cuda")
    for tensor in (*trained.parameters(), *trained.buffers()):
        torch.nn.init.zeros_(tensor)
optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
for step in range(3):
    tokens = torch.randint(0, config.vocab_size, (2, length)).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=variant == "gpt2_ddp"):
        loss = trained(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step)
