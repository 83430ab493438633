"""Reads measured collectives from the output of nccl-tests, in the formats of several versions, and explains failed runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from maya_core.calibrate.nccl_tests import read
from maya_core.errors import MayaError

TWO_NODES = """\
# nccl-tests version 2.17.6 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0
#
# Using devices
{ranks}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    71.85   14.59   27.36       0    70.02   14.98   28.08       0
     2097152        524288     float     sum      -1    98.30   21.33   40.00       0    97.11   21.60   40.49       0
     4194304       1048576     float     sum      -1    152.2   27.56   51.67       0    150.0   27.96   52.43       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 40.0049
#
# Collective test concluded: all_reduce_perf
#
"""
RANKS = "".join(
    f"#  Rank {8 * node + gpu:2d} Group  0 Pid {4000 + gpu:6d} on  gpu-node{node} device {gpu:2d} [0000:{gpu:02x}:00] NVIDIA H100 80GB HBM3\n"
    for node in range(2)
    for gpu in range(8)
)
SEND = """\
mpirun -np 2 -host gpu23,gpu24 ./build/sendrecv_perf -b 256 -e 512 -f 2
# nThread 1 nGpus 1 minBytes 256 maxBytes 512 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 1478709 on      gpu23 device  0 [0x31] NVIDIA A40
#  Rank  1 Group  0 Pid 1171742 on      gpu24 device  0 [0x31] NVIDIA A40
#
#                                                              out-of-place                       in-place          \n\
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n\
         256            64     float     sum      -1    34.24    0.01    0.01      0    33.65    0.01    0.01    N/A
         512           128     float     sum      -1    34.30    0.01    0.01      0    34.15    0.01    0.01    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.01
"""
OLD = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 2097152 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{ranks}#
#                                             out-of-place                       in-place
#       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576         32768     float    60.10   17.45   15.27  0e+00    59.20   17.71   15.50  0e+00
     2097152         65536     float    75.20   27.89   24.40  0e+00    74.80   28.04   24.53  0e+00
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 19.9
#
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "output.txt"
    path.write_text(text)
    return path


def test_two_nodes_of_h100(tmp_path: Path) -> None:
    found = read(written(tmp_path, TWO_NODES.format(ranks=RANKS)))
    assert found.gpu == "h100"
    assert [(row.bytes, row.seconds) for row in found.collectives] == [
        (2**20, pytest.approx(70.02e-6)),  # PyTorch reduces in place
        (2**21, pytest.approx(97.11e-6)),
        (2**22, pytest.approx(150.0e-6)),
    ]
    row = found.collectives[0]
    assert (row.op, row.ranks_per_node, row.nodes, row.network) == ("all_reduce", 8, 2, "infiniband-ndr")
    assert row.samples == 20
    assert (
        read(written(tmp_path, TWO_NODES.format(ranks=RANKS)), network="roce-400").collectives[0].network == "roce-400"
    )


def test_messages_and_the_op_of_the_command_line(tmp_path: Path) -> None:
    found = read(written(tmp_path, SEND))
    assert found.gpu == "a40"
    assert [(row.op, row.bytes, row.seconds) for row in found.collectives] == [
        ("send", 256, pytest.approx(34.24e-6)),
        ("send", 512, pytest.approx(34.30e-6)),
    ]
    assert (found.collectives[0].ranks_per_node, found.collectives[0].nodes) == (1, 2)


def test_older_versions_and_blank_columns(tmp_path: Path) -> None:
    ranks = "".join(f"#   Rank {gpu:2d} Pid {1320 + 0 * gpu:6d} on node1 device {gpu:2d} [0x{gpu:02x}] Tesla V100-SXM2-32GB\n" for gpu in range(8))  # fmt: skip
    path = written(tmp_path, OLD.format(ranks=ranks))
    with pytest.raises(MayaError, match="does not name its test"):
        read(path)
    found = read(path, op="all_gather")
    assert [(row.op, row.seconds, row.network) for row in found.collectives] == [
        ("all_gather", pytest.approx(60.10e-6), ""),
        ("all_gather", pytest.approx(75.20e-6), ""),
    ]


def test_several_tests_in_one_file_and_the_tags_of_mpirun(tmp_path: Path) -> None:
    second = TWO_NODES.replace("all_reduce_perf", "alltoall_perf")
    text = (TWO_NODES + second).format(ranks=RANKS)
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines())
    for each in (text, tagged):
        ops = [row.op for row in read(written(tmp_path, each)).collectives]
        assert ops == ["all_reduce"] * 3 + ["all_to_all"] * 3


def test_a_run_that_failed(tmp_path: Path) -> None:
    failed = TWO_NODES.format(ranks=RANKS).replace("values : 0 OK", "values : 1 FAILED")
    with pytest.raises(MayaError, match="the test failed, 1 values were wrong") as error:
        read(written(tmp_path, failed))
    assert "output.txt" in error.value.problem and "run it again" in error.value.advice
    with pytest.raises(MayaError, match="no measurements"):
        read(written(tmp_path, "gpu1: Test NCCL failure common.cu:954 'unhandled system error'\n"))
    with pytest.raises(MayaError, match="cannot be read"):
        read(tmp_path / "none.txt")


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    text = TWO_NODES.format(ranks=RANKS)
    found = read(written(tmp_path, text[: text.index("     4194304") + 60]))
    assert len(found.collectives) == 2
    assert "did not finish" in found.notes[0]


def test_processes_that_ran_alone(tmp_path: Path) -> None:
    alone = "#  Rank  0 Group  0 Pid   1320 on a device  0 [0x00] Tesla V100-SXM2-16GB\n#  Rank  0 Group  0 Pid   2066 on b device  0 [0x00] Tesla V100-SXM2-16GB\n"
    with pytest.raises(MayaError, match="each process ran alone") as error:
        read(written(tmp_path, TWO_NODES.format(ranks=alone)))
    assert "MPI=1" in error.value.advice


def test_what_is_given_must_agree_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TWO_NODES.format(ranks=RANKS))
    with pytest.raises(MayaError, match="was measured on 2 nodes with 8 ranks each, not on 4 with 8"):
        read(path, nodes=4)
    with pytest.raises(MayaError, match="not on a100"):
        read(path, gpu="a100")
    with pytest.raises(MayaError, match="Maya does not know this test"):
        read(path, op="all_redcue")
    unnamed = written(tmp_path, TWO_NODES.format(ranks=""))
    with pytest.raises(MayaError, match="does not name its GPU"):
        read(unnamed)
    with pytest.raises(MayaError, match="does not list its ranks"):
        read(unnamed, gpu="h100")
    assert len(read(unnamed, gpu="h100", nodes=2, gpus_per_node=8).collectives) == 3
