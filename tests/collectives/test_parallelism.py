"""Unmodified programs with common kinds of parallelism (in programs/) communicate as counted by hand.

Programs whose ranks do not depend on each other are emulated here, as one rank; for the others, `maya run` emulates the ranks that are needed.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import maya_core
from maya_core.hardware.dtypes import item_bytes
from maya_core.trace.call_names import elements
from maya_core.trace.hangs import find_hangs
from maya_core.trace.job import JobTrace, read_job
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
MAYA = str(Path(sys.executable).parent / "maya")
NODES, RANKS = 2, 16

Calls = dict[tuple[str, str, int], tuple[int, int]]  # op, dtype, ranks of the group: calls, bytes sent by the rank


def calls(trace: RankTrace) -> Calls:
    count: Counter[tuple[str, str, int]] = Counter()
    given: Counter[tuple[str, str, int]] = Counter()
    for subject in trace.events["subject"][trace.events["kind"] == EventKind.COLLECTIVE].tolist():
        call = trace.collectives[subject]
        key = call.op, call.dtype, len(trace.communicators[call.communicator].ranks)
        count[key] += 1
        given[key] += elements(call) * item_bytes(call.dtype)
    return {key: (count[key], given[key]) for key in count}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """Runs a program as one rank of 2 nodes of 8."""

    def run(program: str, *arguments: str, rank: int = 0) -> RankTrace:
        monkeypatch.setattr(sys, "argv", [str(PROGRAMS / program), *arguments])
        monkeypatch.syspath_prepend(PROGRAMS)
        with maya_core.emulate("h100", nodes=NODES, gpus_per_node=RANKS // NODES, rank=rank) as job:
            runpy.run_path(sys.argv[0], run_name="__main__")
        return job.trace

    return run


def together(folder: Path, ranks: int, *commands: str, options: tuple[str, ...] = ()) -> JobTrace:
    """Runs programs one after another in a world of that many ranks, of which `maya run` emulates those needed."""
    program = [sys.executable, "-W", "ignore", str(PROGRAMS / "forked.py"), str(ranks), *" -- ".join(commands).split()]
    done = subprocess.run(
        [MAYA, "run", "--gpus-per-node", "8", *options, "--", *program],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    job = read_job(folder / "maya-out")
    assert not find_hangs(job)
    return job


# ---- DistributedDataParallel ----

STEPS = 4
GRADIENTS = 4 * (256 * 256 + 256 + 2 * 256) + 256 * 10 + 10  # four linear layers with batch norms, and a head
SPARE = 256 * 10 + 10  # never used
# PowerSGD of rank 4 from the third step on: one-dimensional gradients, then P and Q of five matrices
COMPRESSED = (4 * (256 + 2 * 256) + 10) + 4 * (4 * 256 + 10) + 4 * (4 * 256 + 256)


@pytest.mark.parametrize(
    ("variant", "dtype", "sent"),
    [
        ("plain", "Float", STEPS * GRADIENTS * 4),
        ("eager", "Float", STEPS * GRADIENTS * 4),
        ("static", "Float", STEPS * GRADIENTS * 4),
        ("view", "Float", STEPS * GRADIENTS * 4),
        ("no_sync", "Float", STEPS * GRADIENTS * 4),  # once for two backward passes
        ("amp", "Float", STEPS * GRADIENTS * 4),
        ("custom", "Float", STEPS * GRADIENTS * 4),
        ("local_sgd", "Float", (STEPS + 2) * GRADIENTS * 4),  # parameters are averaged in steps 1 and 3
        ("unused", "Float", STEPS * (GRADIENTS + SPARE) * 4),
        ("bf16", "BFloat16", STEPS * GRADIENTS * 2),
        ("fp16", "Half", STEPS * GRADIENTS * 2),
        ("powersgd", "Float", 2 * (GRADIENTS + COMPRESSED) * 4),
        ("zero_buckets", "Float", STEPS * GRADIENTS * 4),
        ("zero_overlap", "Float", STEPS * GRADIENTS * 4),
    ],
)
def test_ddp_reduces_its_gradients_once_a_step(alone, variant: str, dtype: str, sent: int) -> None:
    made = calls(alone("ddp.py", variant))
    loss = STEPS * 4 if dtype == "Float" else 0  # the average that is printed
    assert made["all_reduce", dtype, RANKS][1] - loss == sent
    if variant in ("unused", "static"):  # which parameters were used: in every step, or once and for all
        assert made["all_reduce", "Int", RANKS][0] == (STEPS if variant == "unused" else 1)
    if variant == "zero_buckets":  # after a step, every rank broadcasts its part of the parameters
        first = calls(alone("ddp.py", "plain"))["broadcast", "Float", RANKS][1]  # of the model and its buffers
        assert made["broadcast", "Float", RANKS][1] - first == STEPS * GRADIENTS * 4


def test_synchronized_batch_norm(alone) -> None:
    made = calls(alone("ddp.py", "syncbn"))
    assert made["all_gather_into_tensor", "Float", RANKS] == (4 * STEPS, 4 * STEPS * (2 * 256 + 1) * 4)
    # backward: the sums of gradients, and of gradients by inputs
    assert made["all_reduce", "Float", RANKS][1] == STEPS * (GRADIENTS + 4 * 2 * 256 + 1) * 4


# ---- FSDP ----

BLOCKS, BLOCK = 3, 4 * 256 * 256 + 4 * 256 + 2 * 256 + 2 * 4 * 256 * 256 + 4 * 256 + 256
ROOT = 2 * 1000 * 256 + 1000
PADDED_ROOT = -(-ROOT // RANKS) * RANKS


@pytest.mark.parametrize(
    ("variant", "gathered", "reduced"),
    [
        ("plain", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),  # blocks again for backward
        ("orig", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("prefetch", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("recompute", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("offload", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("sync", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("meta", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("clip", 2 * BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("no_sync", 2 * (2 * BLOCKS * BLOCK + PADDED_ROOT), "reduce_scatter_tensor"),
        ("shard_grad_op", BLOCKS * BLOCK + PADDED_ROOT, "reduce_scatter_tensor"),
        ("no_shard", 0, "all_reduce"),
    ],
)
def test_fsdp1_gathers_and_reduces(alone, variant: str, gathered: int, reduced: str) -> None:
    made = calls(alone("fsdp1.py", variant))
    whole = ROOT if variant == "no_shard" else PADDED_ROOT
    assert made.get(("all_gather_into_tensor", "Float", RANKS), (0, 0))[1] == 3 * gathered * 4 // RANKS
    assert made[reduced, "Float", RANKS] == (3 * (BLOCKS + 1), 3 * (BLOCKS * BLOCK + whole) * 4)
    if variant in ("sync", "meta"):
        assert made["broadcast", "Float", RANKS][1] == (BLOCKS * BLOCK + ROOT) * 4
    if variant == "clip":
        assert made["all_reduce", "Float", RANKS] == (3, 3 * 4)


def test_fsdp1_in_bfloat16_gathers_half_as_much(alone) -> None:
    made = calls(alone("fsdp1.py", "orig_bf16"))
    assert made["all_gather_into_tensor", "BFloat16", RANKS][1] == 3 * (2 * BLOCKS * BLOCK + PADDED_ROOT) * 2 // RANKS
    assert made["reduce_scatter_tensor", "Float", RANKS][1] == 3 * (BLOCKS * BLOCK + PADDED_ROOT) * 4


@pytest.mark.parametrize("variant", ["hybrid", "hybrid_mesh"])
def test_fsdp1_hybrid_shards_a_node_and_copies_over_nodes(alone, variant: str) -> None:
    made = calls(alone("fsdp1.py", variant, rank=13))
    assert made["all_gather_into_tensor", "Float", 8][1] == 3 * (2 * BLOCKS * BLOCK + ROOT) * 4 // 8
    assert made["reduce_scatter_tensor", "Float", 8][1] == 3 * (BLOCKS * BLOCK + ROOT) * 4
    assert made["all_reduce", "Float", 2][1] == 3 * (BLOCKS * BLOCK + ROOT) * 4 // 8


def test_fsdp1_full_state_is_gathered_once_more(alone) -> None:
    plain = calls(alone("fsdp1.py", "plain"))["all_gather_into_tensor", "Float", RANKS]
    full = calls(alone("fsdp1.py", "state_full"))["all_gather_into_tensor", "Float", RANKS]
    # parameters, and two moments of each
    assert full[1] - plain[1] == 3 * (BLOCKS * BLOCK + PADDED_ROOT) * 4 // RANKS


LAYERS, LAYER = 4, 4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256
TOP = 2 * 1024 * 256 + 256  # embedding, norm and output


@pytest.mark.parametrize(
    ("variant", "gathered"),
    [
        ("plain", 2 * LAYERS * LAYER + TOP),
        ("meta", 2 * LAYERS * LAYER + TOP),
        ("recompute", 2 * LAYERS * LAYER + TOP),
        ("prefetch", 2 * LAYERS * LAYER + TOP),
        ("fused", 2 * LAYERS * LAYER + TOP),
        ("offload", 2 * LAYERS * LAYER + TOP),
        ("unshard", 2 * LAYERS * LAYER + TOP),
        ("accumulate", 3 * (2 * LAYERS * LAYER + TOP)),  # and reduced once
        ("zero2", LAYERS * LAYER + TOP),
    ],
)
def test_fsdp2_gathers_and_reduces(alone, variant: str, gathered: int) -> None:
    made = calls(alone("fsdp2.py", variant))
    assert made["all_gather_into_tensor", "Float", RANKS][1] == 3 * gathered * 4 // RANKS
    assert made["reduce_scatter_tensor", "Float", RANKS] == (3 * (LAYERS + 1), 3 * (LAYERS * LAYER + TOP) * 4)
    # the norms of 39 gradients; of offloaded ones on the host
    assert made["all_reduce", "Float", RANKS] == (3, 3 * 39 * 4)


def test_fsdp2_in_bfloat16_gathers_half_as_much(alone) -> None:
    made = calls(alone("fsdp2.py", "bf16"))
    assert made["all_gather_into_tensor", "BFloat16", RANKS][1] == 3 * (2 * LAYERS * LAYER + TOP) * 2 // RANKS
    assert made["reduce_scatter_tensor", "Float", RANKS][1] == 3 * (LAYERS * LAYER + TOP) * 4


def test_fsdp2_resharded_to_a_node_gathers_there_for_backward(alone) -> None:
    made = calls(alone("fsdp2.py", "reshard_node"))
    assert made["all_gather_into_tensor", "Float", RANKS][1] == 3 * (LAYERS * LAYER + TOP) * 4 // RANKS
    assert made["all_gather_into_tensor", "Float", 8][1] == 3 * (LAYERS * LAYER + TOP) * 4 // 8


def test_fsdp2_hybrid_shards_a_node_and_copies_over_nodes(alone) -> None:
    made = calls(alone("fsdp2.py", "hsdp", rank=13))
    assert made["all_gather_into_tensor", "Float", 8][1] == 3 * (2 * LAYERS * LAYER + TOP) * 4 // 8
    assert made["reduce_scatter_tensor", "Float", 8][1] == 3 * (LAYERS * LAYER + TOP) * 4
    assert made["all_reduce", "Float", 2][1] == 3 * (LAYERS * LAYER + TOP) * 4 // 8


def test_fsdp2_full_state_is_gathered_once_more(alone) -> None:
    full = calls(alone("fsdp2.py", "full"))["all_gather_into_tensor", "Float", RANKS]
    assert full[1] == 3 * (2 * LAYERS * LAYER + TOP) * 4 // RANKS + 3 * (LAYERS * LAYER + TOP) * 4 // RANKS


# ---- tensor, sequence and context parallelism ----

TOKENS = 2 * 128


def test_tensor_parallel_sums_activations(alone) -> None:
    made = calls(alone("tensor_parallel.py", "tp"))
    forward = 1 + 2 * LAYERS  # embedding; attention and feed-forward of each layer
    backward = 5 * LAYERS + 1  # inputs of wq, wk, wv, w1, w3; of the output
    summed = 3 * (forward + backward) * TOKENS * 256 * 4
    assert made["all_reduce", "Float", 8][1] - 3 * 30 * 4 == summed  # and the norms of 30 split gradients


def test_sequence_parallel_scatters_and_gathers_activations(alone) -> None:
    made = calls(alone("tensor_parallel.py", "loss"))
    changes = 1 + 2 * LAYERS  # between parts that are split by sequence: embedding, and two in each layer
    assert made["reduce_scatter_tensor", "Float", 8] == (3 * 2 * changes, 3 * 2 * changes * TOKENS * 256 * 4)
    assert made["all_gather_into_tensor", "Float", 8] == (3 * 2 * changes, 3 * 2 * changes * TOKENS * 256 * 4 // 8)


@pytest.mark.parametrize(
    ("variant", "sharded", "split", "copied"), [("fsdp_tp", 4, 4, 0), ("hsdp_tp", 4, 2, 2), ("meta", 4, 4, 0)]
)
def test_llama_over_a_mesh_of_two_and_three_dimensions(
    alone, variant: str, sharded: int, split: int, copied: int
) -> None:
    trace = alone("tensor_parallel.py", variant, rank=6)
    sizes = {len(group.ranks) for group in trace.communicators if group.backend == "nccl"} - {RANKS}
    assert sizes == {sharded, split} | ({copied} if copied else set())
    weights = LAYERS * 2 * 256  # norms, whole in every rank
    parameters = LAYERS * (LAYER - 2 * 256) // split + weights + (TOP - 256) // split + 256
    made = calls(trace)
    reduced = made["reduce_scatter_tensor", "Float", sharded]
    assert reduced == (3 * (LAYERS + 1), 3 * parameters * 4)
    if copied:
        assert made["all_reduce", "Float", copied][1] >= 3 * parameters * 4 // sharded


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_context_parallel_passes_keys_and_values_on(alone, method: str) -> None:
    made = calls(alone("context_parallel.py", method))
    local = 2 * TOKENS // 4 * 256 * 2  # keys or values of a rank, in bfloat16
    if method == "allgather":
        whole = 3 * 2 * LAYERS  # forward and backward, keys and values as one
        assert made["all_gather_into_tensor", "BFloat16", 4] == (whole + 1, whole * 2 * local + 2 * 64 * 1024 * 2)
    else:
        rounds = 3 * LAYERS * (4 - 1) * 2
        assert made["all_to_all", "BFloat16", 4] == (rounds, rounds * 2 * local)
    gradients = 3 * LAYERS * 4  # they go all the way round, in float32
    assert made["all_to_all", "Float", 4] == (gradients, gradients * 2 * local * 2)


# ---- experts ----


def test_experts_alone_are_sent_as_much_as_they_send(alone) -> None:
    trace = alone("expert_parallel.py")
    exchanged = [call for call in trace.collectives if call.op == "all_to_all" and call.dtype == "Float"]
    assert all(sum(call.splits_in) == sum(call.splits_out) == 256 * 2 * 128 for call in exchanged)
    assert any(len(set(call.splits_in)) > 1 for call in exchanged)
    # there and back, in forward and in backward
    assert calls(trace)["all_to_all", "Float", RANKS] == (3 * 4, 3 * 4 * 256 * 2 * 128 * 4)


def test_experts_who_know_one_another_exchange_their_counts(tmp_path: Path) -> None:
    job = together(tmp_path, 4, "objects.py gloo", "expert_parallel.py names")
    assert list(job.ranks) == [
        0,
        1,
        2,
        3,
    ]  # the exchange of objects makes Maya emulate all ranks, whose amounts then agree
    sent = [calls(trace)["all_to_all", "Float", 4][1] for trace in job.ranks.values()]
    assert sum(sent) == 4 * 3 * 4 * 256 * 2 * 128 * 4
    assert len(set(sent)) > 1


# ---- pipelines ----


def messages(trace: RankTrace, op: str) -> tuple[int, int]:
    """How many activations and gradients, and their bytes: on the group's communicator, or on one of a pair."""
    made = [value for key, value in calls(trace).items() if key[:2] == (op, "Float")]
    return sum(count for count, _ in made), sum(given for _, given in made)


def test_pipeline_schedules(tmp_path: Path) -> None:
    names = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "Tracer")
    job = together(tmp_path, 4, *(f"pipeline.py {name}" for name in names), options=("--steps", "all"))
    assert list(job.ranks) == [0, 1, 2, 3]
    sent = {rank: messages(trace, "send")[0] for rank, trace in job.ranks.items()}
    batches = 2 * 8  # steps and microbatches
    # One stage in a rank (GPipe, 1F1B, Tracer): to each neighbour. Two (Interleaved*): to both neighbours of both,
    # the first and the last having one less. A V: ranks at its ends have their own second stage as a neighbour there.
    one, two, v = {0: 1, 1: 2, 2: 2, 3: 1}, {0: 3, 1: 4, 2: 4, 3: 3}, {0: 2, 1: 4, 2: 4, 3: 2}
    tracing = {rank: one[rank] for rank in one}  # the tracer's stages connect once, with a tensor of one element
    assert sent == {rank: batches * (3 * one[rank] + 2 * two[rank] + v[rank]) + tracing[rank] for rank in range(4)}
    assert all(trace.steps == 2 * len(names) for trace in job.ranks.values())


def test_only_the_ranks_of_one_pipeline_are_emulated(tmp_path: Path) -> None:
    job = together(tmp_path, 64, "pipeline.py 1F1B 4 4")
    assert (job.world_size, list(job.ranks)) == (64, [0, 16, 32, 48])
    first, last = calls(job.ranks[0]), calls(job.ranks[48])
    for op in ("send", "recv"):
        assert messages(job.ranks[0], op) == (2 * 8, 2 * 8 * 128 * 256 * 4)
    # Two layers: forward has 2 sums per layer, backward 5; the first stage also has the embedding. Shapes are tried once.
    assert first["all_reduce", "Float", 4][0] == 2 * 8 * (2 * (2 + 5) + 1) + 2 * 2 + 1
    assert last["all_reduce", "Float", 4][0] == 2 * 8 * (2 * (2 + 5) + 1) + 2 * (2 + 5) + 1
    assert job.ranks[16].meta["stand_ins"] == {}


# ---- data that ranks read ----


def test_every_rank_reads_what_the_others_gave(tmp_path: Path) -> None:
    """The programs check it themselves, as they would on GPUs."""
    programs = (
        "collectives.py",
        "objects.py nccl",
        "gloo.py",
        "stores.py",
        "ddp.py join",
        "ddp.py zero",
        "fsdp1.py state_local",
    )
    job = together(tmp_path, 4, *programs, options=("--ranks", "all", "--steps", "all"))
    assert {rank: trace.meta["ended"] for rank, trace in job.ranks.items()} == dict.fromkeys(range(4), "completed")
    # Rank r has 4 + r batches for DDP; Join has the others shadow what they no longer do.
    steps = [trace.steps for trace in job.ranks.values()]
    assert [more - steps[0] for more in steps] == [0, 1, 2, 3]


def test_a_store_key_brings_ranks_until_one_sets_it(tmp_path: Path) -> None:
    job = together(tmp_path, 8, "keys.py")
    assert list(job.ranks) == [0, 1, 2]


def test_a_rank_alone_does_not_make_up_objects(alone) -> None:
    with pytest.raises(maya_core.MayaError, match="rank 3 is emulated alone, but receives objects from rank 0"):
        alone("objects.py", "nccl", rank=3)


# ---- checkpoints, and features that are not emulated ----


def test_checkpoints_change_nothing_of_the_users(alone, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "precious.pt")
    before = (tmp_path / "precious.pt").read_bytes()
    alone("checkpoint.py", str(tmp_path))  # which reads what it has saved
    assert (tmp_path / "precious.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["precious.pt"]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("maya:")]
    assert said[:2] == [
        f"maya: under emulation torch.distributed.checkpoint writes no weights: {tmp_path}/step-0",
        f"maya: under emulation torch.distributed.checkpoint reads nothing, tensors stay as they are: {tmp_path}/step-1",
    ]
    assert said[2].startswith("maya: the program wrote 8 files: ") and len(said) == 3


def test_symmetric_memory_is_refused() -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    with maya_core.emulate("h100"):
        assert not symmetric_memory.is_nvshmem_available()
        for use in (lambda: symmetric_memory.empty(8, device="cuda"), lambda: symmetric_memory.set_backend("NVSHMEM")):
            with pytest.raises(maya_core.MayaError, match="symmetric memory is not emulated"):
                use()
