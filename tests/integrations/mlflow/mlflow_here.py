"""A real MLflow server for the tests, and the program that is predicted and then trained for real on this machine's CPU."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

import maya_core
from maya_core.pipeline import analyse
from maya_core.report.analysis import Analysis
from maya_core.report.prediction import Prediction
from maya_core.report.summary import summarize

EXAMPLE = Path(__file__).parents[3] / "examples" / "mlflow_actual.py"
# A core of a server, described as a GPU: by judgement, for there is no GPU here to run on. Predictions for it are off by a factor or two.
HARDWARE = """
[gpus.one-core]
base = "t4"
driver_name = "One core of a server"
peak_flops = { float16 = "60GFLOP/s", float32 = "60GFLOP/s", tf32 = "60GFLOP/s" }
memory_bandwidth_bytes_per_s = "10GB/s"

[[prices]]
gpu = "one-core"
provider = "ours"
usd_per_hour = 0.05
"""
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """`mlflow server` on loopback, with SQLite and a folder for artifacts."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'runs.db'}", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")} | QUIET
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        try:
            _wait_for(uri, process, folder / "server.log")
            yield uri
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # the group that was started here: the server and its worker
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_for(uri: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.3)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mlflow_actual", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Size = dict[str, int]  # arguments of the example
SIZES: list[Size] = [
    {"width": 64, "layers": 2, "batch": 4, "length": 32},
    {"width": 128, "layers": 2, "batch": 4, "length": 64},
    {"width": 96, "layers": 4, "batch": 8, "length": 32},
    {"width": 160, "layers": 2, "batch": 8, "length": 64},
]


def predicted(size: Size, gpu: str = "one-core") -> tuple[Analysis, Prediction]:
    """The example on an emulated GPU, in this process: what `maya run` hands to a tracker."""
    with maya_core.emulate(gpu, steps=3) as emulated:
        example().train(**size, steps=6)
    analysis = analyse(emulated.job)
    return analysis, summarize(analysis)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
