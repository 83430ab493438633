"""A small GPT of Megatron Core, trained for a few steps as a program would: the library alone, without Megatron-LM's scripts."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

LAYERS, HIDDEN, HEADS, TOKENS, BATCH, VOCABULARY = 2, 256, 4, 128, 2, 1024


def train(
    steps: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    engine: bool = True,
    experts: int = 0,
    pattern: str = "",
    **settings: Any,
) -> int:
    """Returns how many parameters this rank has. A pattern is of a hybrid model: M Mamba, * attention, - MLP."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

    distributed_optimizer = settings.pop("distributed_optimizer", False)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    expert_parallel = 2 if experts else 1
    parallel_state.initialize_model_parallel(
        tensor_parallel,
        pipeline_parallel,
        context_parallel_size=context_parallel,
        expert_model_parallel_size=expert_parallel,
        create_gloo_process_groups=False,
    )
    tp.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=len(pattern) or LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel, context_parallel_size=context_parallel, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=not experts, bias_dropout_fusion=True, gradient_accumulation_fusion=False, persist_layer_norm=engine,
        finalize_model_grads_func=finalize_model_grads, num_moe_experts=experts or None, expert_model_parallel_size=expert_parallel,
        add_bias_linear=not experts, moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
        **settings,
    )  # fmt: skip
    if pattern:
        from megatron.core.models.mamba import MambaModel
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        network: Any = MambaModel(config, mamba_stack_spec, VOCABULARY, TOKENS, hybrid_override_pattern=pattern)
        return _steps(steps, config, network.cuda().bfloat16(), distributed_optimizer, context_parallel)
    if engine:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts or None, moe_grouped_gemm=bool(experts)
        )
    else:
        spec = specs.get_gpt_layer_local_spec()
    network = GPTModel(
        config, spec, VOCABULARY, TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).cuda().bfloat16()  # fmt: skip
    return _steps(steps, config, network, distributed_optimizer, context_parallel)


def _steps(steps: int, config: Any, network: Any, distributed_optimizer: bool, context_parallel: int) -> int:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=distributed_optimizer,
        fp8_param_gather=config.fp8_param,
    )
    model = DistributedDataParallel(config, ddp, network)
    config.no_sync_func = model.no_sync  # gradients are reduced once a step, as in Megatron-LM's own training
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed_optimizer, fp8_recipe=config.fp8_recipe),
        [model], use_gloo_process_groups=False,
    )  # fmt: skip

    def forward_step(data: Any, model: Any) -> Any:
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS // context_parallel)).cuda()
        positions = torch.arange(TOKENS // context_parallel, device="cuda").expand(BATCH, -1)
        out = model(tokens, positions, None, labels=tokens)
        return out, lambda out: (out.float().mean(), {})

    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=None, model=[model], num_microbatches=2, seq_length=TOKENS,
            micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        optimizer.step()
    return sum(p.numel() for p in network.parameters())


def leave() -> None:
    with contextlib.suppress(AssertionError, ValueError):
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import json
    import sys

    train(5, **json.loads(sys.argv[1]))
