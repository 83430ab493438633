"""A GPT of Megatron Core, two tensor parallel ranks to each of two pipeline stages, with sequence parallelism."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

TENSOR, PIPELINE, LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY, BATCH, MICROBATCHES = 2, 2, 2, 2048, 16, 1024, 32000, 2, 4


def configuration() -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        sequence_parallel=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.1,
        bias_dropout_fusion=True,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=True,
        finalize_model_grads_func=finalize_model_grads,
    )


def batches() -> Iterator[torch.Tensor]:
    while True:
        yield torch.randint(VOCABULARY, (BATCH, TOKENS + 1)).cuda()


def forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(data)
    positions = torch.arange(TOKENS, device="cuda").expand(BATCH, -1)
    losses = model(batch[:, :-1].contiguous(), positions, None, labels=batch[:, 1:].contiguous())
    return losses, lambda losses: (losses.float().mean(), {})


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    torch.manual_seed(0)
    parallel_state.initialize_model_parallel(TENSOR, PIPELINE, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = configuration()
    network = GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(),
        VOCABULARY,
        TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, network.cuda().bfloat16())
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches(),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
