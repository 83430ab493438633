"""Megatron Core in this process: what is recorded of its layers, what they store, and that everything is restored."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from maya_megatron import log
from maya_megatron.engine import dot_product_attention, graphs, optimizers, padding, router
from maya_megatron.engine import layers as layers_of_weights
from megatron_gpt import BATCH, HIDDEN, LAYERS, TOKENS, VOCABULARY, train

import maya_core
from maya_core.trace.schema import EventKind

MICROBATCHES = 2
STEPS = 2
GPT_PARAMETERS = 2 * VOCABULARY * HIDDEN + TOKENS * HIDDEN + LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + 2 * HIDDEN


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not [one for one in sys.meta_path if type(one).__module__.startswith("maya_")]
    assert not torch.cuda.is_available() and not torch.distributed.is_initialized()
    assert "transformer_engine" not in sys.modules and "apex" not in sys.modules


def calls(job: maya_core.emulate, op: str) -> int:
    """How often it was called in all steps."""
    trace = job.trace
    numbers = [number for number, one in enumerate(trace.calls) if one.op == op]
    return int(np.isin(trace.ops["subject"], numbers).sum())


def collectives(job: maya_core.emulate) -> Counter[tuple[str, int, int]]:
    """How often each was called in all steps: (op, elements, ranks)."""
    trace = job.trace
    numbers = trace.events["subject"][trace.events["kind"] == EventKind.COLLECTIVE]
    kinds = [(one.op, one.elements_in, len(trace.communicators[one.communicator].ranks)) for one in trace.collectives]
    return Counter(kinds[number] for number in numbers)


def test_a_gpt_of_tensor_parallel_ranks() -> None:
    with maya_core.emulate("a100", gpus_per_node=8, nodes=1) as job:
        train(STEPS, tensor_parallel=2)
    found = job.prediction
    assert (found.world.size, found.trace.steps) == (8, 2)
    assert found.step_time_s is not None
    # Row-parallel layers reduce what they give, column-parallel ones the gradient of what they got: two of each in a layer.
    whole = TOKENS * BATCH * HIDDEN
    # and the embedding's forward, the output layer's backward
    assert collectives(job)["all_reduce", whole, 2] == STEPS * MICROBATCHES * (4 * LAYERS + 2)
    # Dropout, bias and residual are one kernel, as torch.compile makes them.
    assert calls(job, "megatron::bias_dropout_add") == STEPS * MICROBATCHES * 2 * LAYERS


def test_memory_of_weights_and_optimizer() -> None:
    with maya_core.emulate("a100", gpus_per_node=2, nodes=1) as job:
        parameters = train(STEPS)
    assert parameters == GPT_PARAMETERS
    by_category = job.prediction.memory.ranks[0].by_category_bytes
    # 16 bits and a copy of 32 bits; gradients of 32 bits in one buffer; two states
    assert by_category["optimizer_state"] == pytest.approx(8 * parameters, rel=0.01)
    assert by_category["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    assert by_category["parameters"] == pytest.approx(6 * parameters, rel=0.01)


def test_the_distributed_optimizer_has_a_share_of_the_states() -> None:
    with maya_core.emulate("a100", gpus_per_node=4, nodes=1) as job:
        parameters = train(STEPS, distributed_optimizer=True)
    by_category = job.prediction.memory.ranks[0].by_category_bytes
    assert by_category["optimizer_state"] == pytest.approx(8 * parameters / 4, rel=0.02)
    ops = {op for op, *_ in collectives(job)}
    assert {"reduce_scatter_tensor", "all_gather_into_tensor"} <= ops, ops


def test_experts_in_parallel() -> None:
    with maya_core.emulate("a100", gpus_per_node=4, nodes=1) as job:
        train(STEPS, experts=4, moe_grouped_gemm=True)
    sent = sum(count for (op, *_), count in collectives(job).items() if op == "all_to_all")
    # Tokens and their probabilities to the experts, tokens back, each with its backward
    assert sent >= STEPS * MICROBATCHES * LAYERS * 4
    assert job.prediction.step_time_s is not None


def test_permutation_of_tokens_by_fused_kernels() -> None:
    with maya_core.emulate("h100", gpus_per_node=4, nodes=1) as job:
        train(STEPS, experts=4, moe_grouped_gemm=True, moe_permute_fusion=True)
    layers = STEPS * MICROBATCHES * LAYERS
    # Backward of one is the other.
    assert calls(job, "transformer_engine::permute") == calls(job, "transformer_engine::unpermute") == 2 * layers
    assert calls(job, "transformer_engine::row_id_map_pass_1") == layers


def test_routers_as_single_kernels() -> None:
    with maya_core.emulate("h100", gpus_per_node=4, nodes=1) as job:
        train(STEPS, experts=4, moe_grouped_gemm=True, moe_router_fusion=True, moe_router_topk=2)
    assert calls(job, "transformer_engine::topk_with_scores") == STEPS * MICROBATCHES * LAYERS
    assert not calls(job, "aten::topk")
    with maya_core.emulate("h100"):
        _, mask = router.fused_topk_with_score_function(torch.empty(64, 8, device="cuda"), 2, *[None] * 6)
        assert mask.sum().item() == 2 * 64


def test_attention_copies_what_lies_in_no_known_way() -> None:
    with maya_core.emulate("h100"):
        heads, width = 4, 8
        mixed = torch.empty(16, 2, heads, 3 * width, device="cuda")
        assert dot_product_attention._layout_known(*mixed.split(width, dim=-1))  # each head's three side by side
        mixed = torch.empty(16, 2, 3 * heads, width, device="cuda")
        assert dot_product_attention._layout_known(*mixed.split(heads, dim=2))  # all queries, all keys, all values
        # Groups of queries share a key: queries are copied when they are brought into heads, keys and values lie among what is left.
        grouped = torch.empty(16, 2, heads, 4 * width, device="cuda")
        query, key, value = grouped.split([2 * width, width, width], dim=-1)
        assert not dot_product_attention._layout_known(query.reshape(16, 2, 2 * heads, width), key, value)
        assert dot_product_attention._layout_known(
            *(one.contiguous() for one in (query.reshape(16, 2, 2 * heads, width), key, value))
        )


@pytest.mark.parametrize(("gpu", "deterministic", "backend"), [
    ("a100", "0", "flash"), ("a100", "1", "flash"), ("h100", "0", "fused"), ("h100", "1", "fused"), ("b200", "0", "flash"),
])  # fmt: skip
def test_which_attention_runs(gpu: str, deterministic: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", deterministic)
    with maya_core.emulate(gpu):
        query = torch.empty(16, 2, 4, 64, dtype=torch.bfloat16, device="cuda")
        assert dot_product_attention.backend_of(query, query, None) == backend


def test_attention_of_heads_that_no_fused_kernel_takes() -> None:
    with maya_core.emulate("h100"):
        query = torch.empty(16, 2, 4, 52, dtype=torch.bfloat16, device="cuda")
        assert dot_product_attention.backend_of(query, query, None) == "unfused"


def test_states_of_the_optimizer_in_16_bits() -> None:
    with maya_core.emulate("h100"):
        parameter = torch.nn.Parameter(torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda"))
        optimizer = optimizers.FusedAdam(
            [parameter], master_weights=True, store_param_remainders=True, use_decoupled_grad=True,
            exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16,
        )  # fmt: skip
        parameter.decoupled_grad = torch.empty_like(parameter)  # type: ignore[attr-defined]
        before = torch.cuda.memory_allocated()
        optimizer.step()
        assert torch.cuda.memory_allocated() - before == 3 * 2 * parameter.numel()  # and the lower halves of weights
        # Both averages are widened for the step.
        assert torch.cuda.max_memory_allocated() - before >= (3 * 2 + 2 * 4) * parameter.numel()


def test_context_parallel_ranks_pass_keys_and_values_on() -> None:
    with maya_core.emulate("a100", gpus_per_node=2, nodes=1) as job:
        train(STEPS, context_parallel=2, attention_dropout=0.0)
    pair = 2 * BATCH * TOKENS // 2 * HIDDEN
    sent = {elements: count for (op, elements, _), count in collectives(job).items() if op == "send"}
    # One of two blocks is fetched in forward; both in backward, with their gradients.
    assert sent == {pair: STEPS * MICROBATCHES * LAYERS, 2 * pair: STEPS * MICROBATCHES * LAYERS * 2}
    assert calls(job, "aten::_scaled_dot_product_flash_attention") == STEPS * MICROBATCHES * LAYERS * 2


def test_layers_as_cuda_graphs() -> None:
    with maya_core.emulate("h100") as job:
        layers = tuple(layers_of_weights.Linear(64, 64, device="cuda") for _ in range(2))
        microbatches = 2
        samples = [(torch.empty(16, 64, device="cuda", requires_grad=True),) for _ in range(2 * microbatches)]
        graphed = graphs.make_graphed_callables(
            layers, samples, num_warmup_iters=1, _order=[1, 1, -1, -1], _num_layers_per_chunk=[2],
            _reuse_graph_input_output_buffers=True,
        )  # fmt: skip
        captured = torch.cuda.memory_allocated()
        for first, second in (graphed[:2], graphed[2:]):
            second(first(torch.empty(16, 64, device="cuda"))).sum().backward()
        assert layers[0].weight.grad is not None
        # What graphs write to is there already; new are the gradients of weights and biases, and what is copied in.
        assert torch.cuda.memory_allocated() - captured < 16 * 64 * 4
    # Warmed up, then replayed: a product forward and two backward (one for the first, whose input wants no gradient in the loop).
    assert calls(job, "aten::mm") == 2 * 2 * microbatches * 3


def test_a_hybrid_of_mamba_and_attention() -> None:
    with maya_core.emulate("h100", gpus_per_node=2, nodes=1) as job:
        train(STEPS, pattern="M*-M", mamba_num_groups=2, mamba_state_dim=64)
    scans = STEPS * MICROBATCHES * 2
    assert calls(job, "mamba_ssm::chunk_scan") == scans
    # The convolution is run once more in backward, instead of keeping what it gave.
    assert calls(job, "mamba_ssm::causal_conv1d") == 2 * scans
    assert job.prediction.step_time_s is not None


def test_layers_of_torch_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAYA_TRANSFORMER_ENGINE", "0")
    monkeypatch.setenv("MAYA_APEX", "0")
    with maya_core.emulate("h100", gpus_per_node=2, nodes=1) as job:
        assert train(STEPS, engine=False) == GPT_PARAMETERS
    assert calls(job, "megatron::bias_gelu") == STEPS * MICROBATCHES * LAYERS
    assert not calls(job, "transformer_engine::multi_tensor_adam")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_eight_bits(recipe: str) -> None:
    with maya_core.emulate("h100", gpus_per_node=2, nodes=1) as job:
        train(STEPS, fp8="hybrid", fp8_recipe=recipe)
    passes = STEPS * MICROBATCHES * LAYERS
    linears = 4  # in a layer, with a product forward and two backward
    assert calls(job, "aten::_scaled_mm") == passes * linears * 3
    dtypes = {one.arguments[0].dtype for one in job.trace.calls if one.op == "aten::_scaled_mm"}
    assert dtypes == {"Float8_e4m3fn", "Float8_e5m2"}  # gradients have a wider range
    # Delayed scaling reduces the largest values of all layers at once, forward and backward; the other recipe looks at each tensor.
    assert calls(job, "transformer_engine::amax_and_scale_update") == (recipe == "delayed") * STEPS * MICROBATCHES * 2
    # Norms see the largest value themselves; weights are quantized once a step; the input of attention's projection once more in backward,
    # for attention keeps it in 16 bits anyway (save_original_input).
    looked = passes * (2 + 1 + linears) + STEPS * LAYERS * linears
    assert calls(job, "transformer_engine::amax") == (recipe == "tensorwise") * looked
    # Outputs of the embedding and of the last layer stay in 16 bits: two norms quantize in a layer and microbatch.
    by_norms = passes * 2 if recipe == "delayed" else 0
    assert calls(job, "transformer_engine::layernorm_quantize") == by_norms


@pytest.mark.parametrize(("gpu", "recipe"), [("h100", "blockwise"), ("b200", "mxfp8"), ("b200", "tensorwise")])
def test_eight_bits_by_blocks_and_on_blackwell(gpu: str, recipe: str) -> None:
    with maya_core.emulate(gpu, gpus_per_node=2, nodes=1) as job:
        train(STEPS, tensor_parallel=2, sequence_parallel=True, fp8="e4m3", fp8_recipe=recipe)
    assert calls(job, "aten::_scaled_mm") == STEPS * MICROBATCHES * LAYERS * 4 * 3
    # Sequence-parallel ranks gather bytes. Blackwell multiplies without transposes.
    assert bool(calls(job, "transformer_engine::fp8_transpose")) == (gpu == "h100")


def test_weights_in_eight_bits_are_kept_twice() -> None:
    peaks, parameters = {}, {}
    for settings in ({}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}):
        with maya_core.emulate("h100", gpus_per_node=2, nodes=1) as job:
            train(1, **settings)
            peaks[bool(settings)] = torch.cuda.memory_allocated()
        parameters[bool(settings)] = job.prediction.memory.ranks[0].by_category_bytes["parameters"]
    # As they are, and transposed
    wanted = pytest.approx(2 * LAYERS * 12 * HIDDEN**2, rel=0.05)
    assert peaks[True] - peaks[False] == wanted
    assert parameters[True] - parameters[False] == wanted


def test_parameters_in_eight_bits() -> None:
    with maya_core.emulate("h100", gpus_per_node=4, nodes=1) as job:
        train(
            STEPS, distributed_optimizer=True, tensor_parallel=2, sequence_parallel=True,
            fp8="e4m3", fp8_recipe="tensorwise", fp8_param=True,
        )  # fmt: skip
    # They are gathered as bytes, half of those that two ranks share.
    weights = LAYERS * 12 * HIDDEN**2 // 2
    gathered = {elements for op, elements, ranks in collectives(job) if op == "all_gather_into_tensor"}
    assert any(weights // 2 <= elements < weights // 2 * 1.01 for elements in gathered), gathered
    assert calls(job, "aten::_scaled_mm") == STEPS * MICROBATCHES * LAYERS * 4 * 3


def test_experts_in_eight_bits() -> None:
    with maya_core.emulate("h100", gpus_per_node=4, nodes=1) as job:
        train(STEPS, experts=4, moe_grouped_gemm=True, fp8="hybrid", fp8_recipe="tensorwise")
    assert (
        calls(job, "aten::_scaled_mm") > STEPS * MICROBATCHES * LAYERS * (2 + 2) * 3
    )  # two experts a rank, and attention
    assert padding.padded([1, 16, 17, 0], padding.ALIGNED) == [16, 16, 32, 0]


@pytest.mark.parametrize(("gpu", "recipe", "why"), [("a100", "delayed", "8.9"), ("h100", "mxfp8", "capability 10")])
def test_eight_bits_are_refused(gpu: str, recipe: str, why: str) -> None:
    with maya_core.emulate(gpu, gpus_per_node=1, nodes=1):
        with pytest.raises(maya_core.MayaError, match=why):
            train(STEPS, fp8="hybrid", fp8_recipe=recipe)


def test_the_log_has_no_times_of_the_emulator() -> None:
    line = (
        " [2026-01-01 00:00:00.000000] iteration        2/      50 | consumed samples:           64 | elapsed time per iteration (ms): 417.9 |"
        " throughput per GPU (TFLOP/s/GPU): 3.4 | learning rate: 9.6E-05 | lm loss: 5.0E-01 |"
    )
    shown = log.masked(line)
    assert "417.9" not in shown and "3.4" not in shown
    assert "lm loss: 5.0E-01 |" in shown and "step time: predicted at the end |" in shown
    place = log.to_fill_in(line, tflop_per_gpu=100.0)
    filled = place["text"].format(step_ms=250.0, rates=[work / 250.0 for work in place["work"]])
    assert "| elapsed time per iteration (ms): 250.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | learning" in filled
    assert log.to_fill_in("memory (MB) | allocated: 464.5", None) is None
    assert (
        log.masked("time to initialize megatron (seconds): 3.1")
        == "time to initialize megatron (seconds): not measured"
    )
    assert log.masked("[Rank 0] (after 1 iterations) memory (MB) | allocated: 464.5") == (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 464.5"
    )
