"""A GPT of Megatron Core, dense or with experts, trained on generated tokens. Tensor, sequence, pipeline (also interleaved), expert and
data parallel by its arguments. Nothing in it refers to Maya:

torchrun --nnodes 8 --nproc-per-node 8 recipes/programs/megatron_gpt.py --tp 4 --pp 2
"""

import argparse
import os

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--heads", type=int, default=48)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--ffn", type=int, help="default: four times the hidden size")
    parser.add_argument(
        "--gated", action="store_true", help="SwiGLU, RMSNorm, rotary positions, no biases: as Llama and Mixtral"
    )
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=51200)
    parser.add_argument("--batch", type=int, default=512, help="sequences of all GPUs in a step")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=1, help="chunks of layers to a pipeline stage")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> TransformerConfig:
    full = args.recompute == "full"
    settings = dict(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_heads or args.heads,
        ffn_hidden_size=args.ffn or 4 * args.hidden,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        # As Megatron-LM sets them: a stage of an interleaved pipeline has messages under way in both directions, which of two stages
        # would be mistaken for one another in a batch.
        overlap_p2p_comm=args.chunks > 1,
        batch_p2p_comm=args.chunks == 1,
        sequence_parallel=args.sequence_parallel and args.tp > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=True,
        masked_softmax_fusion=True,
        gradient_accumulation_fusion=True,
        recompute_granularity=None if args.recompute == "none" else args.recompute,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        finalize_model_grads_func=finalize_model_grads,
    )
    if args.gated:
        settings |= dict(
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
        )
    settings["bias_activation_fusion"] = not args.experts
    if args.experts:
        settings |= dict(
            num_moe_experts=args.experts,
            expert_model_parallel_size=args.ep,
            moe_router_topk=args.top_k,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
            moe_grouped_gemm=True,
        )
    return TransformerConfig(**settings)


def chunk(args: argparse.Namespace, config: TransformerConfig, number: int | None) -> torch.nn.Module:
    """The layers of this rank; of several chunks, that one."""
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=args.experts or None, moe_grouped_gemm=bool(args.experts)
    )
    at = {} if number is None else {"vp_stage": number, "ignore_virtual": False}
    model = GPTModel(
        config,
        spec,
        args.vocabulary,
        args.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        share_embeddings_and_output_weights=not args.gated,
        position_embedding_type="rope" if args.gated else "learned_absolute",
        parallel_output=True,
        vp_stage=number,
    )
    return model.cuda(torch.cuda.current_device()).bfloat16()


def main() -> None:
    args = arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        args.tp,
        args.pp,
        virtual_pipeline_model_parallel_size=args.chunks if args.chunks > 1 else None,
        expert_model_parallel_size=args.ep,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = configuration(args)
    chunks = [None] if args.chunks == 1 else list(range(args.chunks))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_grad_reduce=True,
        overlap_param_gather=args.distributed_optimizer,
    )
    model = [
        DistributedDataParallel(config, ddp, chunk(args, config, number), disable_bucketing=place > 0)
        for place, number in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=args.distributed_optimizer,
            overlap_param_gather=args.distributed_optimizer,
        ),
        model,
        use_gloo_process_groups=False,
    )
    # As Megatron's own training loop does it:
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [one.no_sync for one in model] if len(model) > 1 else model[0].no_sync
    data_parallel = parallel_state.get_data_parallel_world_size()
    microbatches, rest = divmod(args.batch, data_parallel * args.micro_batch)
    assert not rest, f"{args.batch} sequences cannot be split into {data_parallel} x {args.micro_batch}"
    positions = torch.arange(args.sequence, device="cuda").expand(args.micro_batch, -1)

    def batches():
        while True:
            yield torch.randint(args.vocabulary, (args.micro_batch, args.sequence + 1)).cuda(non_blocking=True)

    def forward(data, part):
        tokens = next(data)
        losses = part(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
        return losses, lambda losses: (losses.float().mean(), {})

    run = get_forward_backward_func()
    for _ in range(args.steps):
        for one in model:
            one.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=[batches() for _ in model] if len(model) > 1 else batches(),
            model=model if len(model) > 1 else model[0],
            num_microbatches=microbatches,
            seq_length=args.sequence,
            micro_batch_size=args.micro_batch,
            forward_only=False,
        )
        optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
