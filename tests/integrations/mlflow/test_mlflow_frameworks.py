"""A program has the same fingerprint emulated and trained for real, whichever framework runs its loop. What a program logs to MLflow itself
under emulation reaches nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import maya_mlflow
import mlflow
import pytest
import torch
from maya_mlflow import context, keys
from maya_mlflow.fingerprint import predicted_job
from maya_mlflow.pairs import Run, pairs_of, run_of
from mlflow import MlflowClient
from mlflow_here import free_port

import maya_core
from maya_core.recording.workload import WorkloadRecord
from maya_core.report.prediction import Prediction


@pytest.fixture
def here(uri: str, place: Path, sent_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return tmp_path


def runs(uri: str, experiment: str) -> list[Run]:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    every = client.search_runs([found.experiment_id], order_by=["attributes.start_time"])
    return [run_of(one) for one in every]


def check_pair(uri: str, experiment: str) -> tuple[Run, Run]:
    """One run of each kind, joined by what they are runs of, with as many samples to a step."""
    predicted, actual = runs(uri, experiment)
    (pair,) = pairs_of([predicted, actual])
    assert pair.by == "fingerprint" and not pair.differences()
    assert (predicted.kind, actual.kind) == ("predicted", "actual")
    for name in (keys.SAMPLES, keys.TOKENS):
        assert (name in predicted.metrics) == (name in actual.metrics)
        if name in actual.metrics:
            of_a_step = [run.metrics[name] * run.metrics[keys.STEP_TIME] for run in (predicted, actual)]
            assert of_a_step[0] == pytest.approx(of_a_step[1])
    return predicted, actual


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(package: str, uri: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import importlib

    from integrations.lightning.lightning_net import loader, net
    from maya_lightning import MayaEmulator
    from maya_mlflow.lightning import RecordActual

    pl = importlib.import_module(package)
    options: dict[str, Any] = {
        "max_steps": 12,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "limit_val_batches": 1,
    }
    model = net(pl)
    emulator = MayaEmulator("h100", mlflow=f"in {package}")
    recorder = RecordActual(gpu="h100", experiment=f"in {package}", warm_up=2)
    pl.Trainer(**options, plugins=[emulator], callbacks=[recorder]).fit(model, loader(), loader())
    assert "under emulation no actual run is recorded" in capfd.readouterr().err
    pl.Trainer(**options, accelerator="cpu", devices=1, callbacks=[recorder]).fit(model, loader(), loader())
    predicted, actual = check_pair(uri, f"in {package}")
    assert predicted.metrics[keys.STEP_TIME] == pytest.approx(emulator.prediction.step_time_s)
    assert actual.metrics[keys.STEPS] == 10 and actual.params["maya/samples_per_step"] == "32"


def test_huggingface(uri: str, here: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "huggingface"))
    from hf_programs import MODEL
    from maya_huggingface import MayaCallback
    from maya_mlflow.huggingface import RecordActual
    from transformers import Trainer, TrainingArguments

    names: dict[str, Any] = {}
    exec(MODEL, names)
    model = names["model"]()
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": 8,
    }
    maya = MayaCallback("h100", mlflow="in transformers")
    Trainer(
        model, TrainingArguments(str(here / "a"), bf16=True, **given), train_dataset=names["Tokens"](), callbacks=[maya]
    ).train()
    args = TrainingArguments(str(here / "b"), use_cpu=True, bf16=True, **given)
    record = RecordActual(gpu="h100", experiment="in transformers", warm_up=2)
    with torch.backends.mkldnn.flags(enabled=False):  # some CPUs die of its bfloat16 products
        Trainer(model, args, train_dataset=names["Tokens"](), callbacks=[record]).train()
    predicted, actual = check_pair(uri, "in transformers")
    assert predicted.params["maya/precision"] == actual.params["maya/precision"] == "float32, autocast bfloat16"
    assert actual.params["maya/calls_per_step"] == "3" and actual.params["maya/tokens_per_step"] == "384"


SHARDED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

def train(kind, steps):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    if not dist.is_initialized():  # made anew on the same store, a group may meet what is left of the last
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
    model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 7)).to(device)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh(device, (world,)))
    elif kind == "fsdp1":
        model = FSDP(model, use_orig_params=True, device_id=torch.device(device, rank) if device == "cuda" else torch.device("cpu"))
    else:
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(4, 30, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    import maya_mlflow
    from maya_mlflow import recorder
    recorder.upload_or_keep = lambda draft, folder: print("LOGGED", dist.get_rank(), draft.tags["maya.fingerprint"], sorted(draft.metrics), flush=True)
    for kind in sys.argv[1:]:
        with maya_mlflow.record_actual(gpu="h100", warm_up=1):
            train(kind, 4)
        dist.barrier()
    dist.destroy_process_group()
"""


def test_sharded_models_have_the_fingerprint_of_the_emulated_ones_and_one_run_for_all_ranks(here: Path) -> None:
    """Two real ranks on the CPU, by torchrun; of the emulated two, one runs."""
    (here / "sharded.py").write_text(SHARDED)
    names: dict[str, Any] = {"__name__": "sharded"}
    exec(SHARDED, names)
    expected = {}
    for kind in ("fsdp2", "fsdp1", "ddp"):
        with maya_core.emulate("h100", nodes=1, gpus_per_node=2, steps=3) as emulated:
            names["train"](kind, 5)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        job = predicted_job(emulated.prediction)
        assert job is not None
        assert (job.workload.trained_parameters, sum(job.workload.shapes.values())) == (30 * 50 + 50 + 50 * 7 + 7, 4)
        assert job.workload.group_sizes == [2] and job.gpus_per_node == 2
        expected[kind] = job.fingerprint
    assert len(set(expected.values())) == 3
    result = subprocess.run(
        [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "sharded.py", *expected],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    logged = [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("LOGGED")]
    assert logged == [["0", fingerprint] for fingerprint in expected.values()], result.stdout


def small_job(**inside: Any) -> Prediction:
    with maya_core.emulate("h100", steps=3) as emulated:
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(4):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
            for call in inside.values():
                call(step)
    return emulated.prediction


@pytest.mark.parametrize("logged_before", [False, True])
def test_what_a_program_logs_under_emulation_reaches_nobody(
    logged_before: bool, uri: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own run, begun before, is as it was; those it begins or resumes meanwhile are answered, and gone afterwards."""
    monkeypatch.setenv("MAYA_PAIR_ID", "of-the-real-run")
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("the user's")
    begun: dict[str, str] = {}

    def log(step: int) -> None:
        mlflow.log_metric("loss", 1.0, step=step)
        mlflow.log_text("constants", "emulated.txt")
        if not begun:
            mlflow.set_experiment("another")
            with mlflow.start_run(nested=True) as inner:
                begun["inner"] = inner.info.run_id
                mlflow.log_text("weights", "model.txt")
                assert keys.KIND not in MlflowClient().get_run(inner.info.run_id).data.tags  # it is no actual run
            mlflow.set_tracking_uri(f"http://127.0.0.1:{free_port()}")  # where nobody answers: nor is anybody asked
            mlflow.start_run(run_id="0123456789abcdef0123456789abcdef", nested=True)
            mlflow.set_tracking_uri(uri)

    try:
        with mlflow.start_run() as mine:
            if logged_before:
                mlflow.log_text("mine", "before.txt")
            small_job(log=log)
            assert mlflow.active_run() is not None and mlflow.active_run().info.run_id == mine.info.run_id
            mlflow.log_metric("afterwards", 2.0)
            mlflow.log_text("mine", "afterwards.txt")
        with mlflow.start_run() as later:
            assert later.info.experiment_id == mine.info.experiment_id
        client = MlflowClient(uri)
        artifacts = {
            one.path for one in client.list_artifacts(mine.info.run_id)
        }  # before MLflow 3.8, of the global URI
    finally:
        monkeypatch.setattr("mlflow.tracking.fluent._active_experiment_id", None)
        mlflow.set_tracking_uri(None)
    run = client.get_run(mine.info.run_id)
    assert artifacts == {"afterwards.txt"} | ({"before.txt"} if logged_before else set())
    assert run.data.metrics == {"afterwards": 2.0} and run.info.status == "FINISHED"
    assert run.data.tags[keys.KIND] == "actual" and run.data.tags[keys.PAIR] == "of-the-real-run"
    assert client.get_experiment_by_name("another") is None
    with pytest.raises(mlflow.exceptions.MlflowException, match="not found"):
        client.get_run(begun["inner"])
    said = capfd.readouterr().err
    assert said.count("under emulation, what the program logs to MLflow is not sent") == 1


def test_loggers_and_checkpoints_are_for_another_trainer_afterwards(uri: str, here: Path) -> None:
    """Lightning's logger for MLflow begins a run as soon as it is asked its version, and a checkpoint callback asks."""
    import lightning.pytorch as package
    from integrations.lightning.lightning_net import loader, net
    from maya_lightning import MayaEmulator

    logger = package.loggers.MLFlowLogger("of lightning", tracking_uri=uri)
    checkpoint = package.callbacks.ModelCheckpoint(every_n_train_steps=1)
    before = [dict(vars(one)) for one in (logger, checkpoint)]
    model = net(package)
    shared: dict[str, Any] = {"max_steps": 4, "logger": logger, "callbacks": [checkpoint], "enable_progress_bar": False}
    package.Trainer(plugins=[MayaEmulator("h100")], **shared).fit(model, loader())
    assert [dict(vars(one)) for one in (logger, checkpoint)] == before
    try:
        package.Trainer(accelerator="cpu", devices=1, log_every_n_steps=1, **shared).fit(model, loader())
    finally:
        mlflow.set_tracking_uri(None)
    assert "loss" in MlflowClient(uri).get_run(str(logger.run_id)).data.metrics and checkpoint.best_model_path


def test_of_several_models_the_first_is_given_the_data() -> None:
    first, second = torch.nn.LSTM(4, 4, batch_first=True), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    record = WorkloadRecord()
    for _ in range(2):
        for _ in range(3):  # accumulated
            second(first(torch.randn(16, 5, 4))[0][:, -1]).sum().backward()
        optimizer.step()
    record.close()
    assert record.samples_per_step == 48


# As DeepSpeed 0.19's ZeRO steps an optimizer, sub-group by sub-group: its own engine takes half a minute to build on a CPU.
ENGINE = """
class Engine:
    global_steps = 0

    def _take_model_step(self, optimizer):
        for _ in range(3):
            optimizer.step()
        self.global_steps += 1

def initialize_optimizer_states(optimizer):
    optimizer.step()
"""


def test_parts_of_deepspeeds_step_are_one_step(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    names: dict[str, Any] = {"__name__": "deepspeed.runtime.engine"}
    exec(ENGINE, names)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", ModuleType("deepspeed.runtime.engine"))
    optimizer, engine = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1), names["Engine"]()
    with maya_mlflow.record_actual(warm_up=50) as record:
        names["initialize_optimizer_states"](optimizer)
        for _ in range(4):
            engine._take_model_step(optimizer)
        assert record._done == 4


def test_emulated_steps_are_not_recorded_as_actual_ones(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with maya_mlflow.record_actual(warm_up=1) as record:
        small_job()
    assert record.sent is None and record.metrics == {}
    assert "the actual run was not recorded, because some of its steps were emulated" in capfd.readouterr().err


def test_as_the_page_says_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import maya_mlflow; maya_mlflow.lightning.RecordActual; maya_mlflow.huggingface.RecordActual"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_runs_are_tagged_only_where_a_launcher_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAYA_PAIR_ID", raising=False)
    monkeypatch.delenv("MAYA_FINGERPRINT", raising=False)
    assert not context.RunContext().in_context()
    monkeypatch.setenv("MAYA_FINGERPRINT", "f00d")
    assert context.RunContext().tags() == {keys.KIND: "actual", keys.FINGERPRINT: "f00d"}


def test_mlflow_is_not_imported_unless_it_is_asked_for() -> None:
    code = "import sys; import maya_core.cli; maya_core.cli.entry()"
    watch = "import atexit, sys; atexit.register(lambda: print('IMPORTED', 'mlflow' in sys.modules, 'matplotlib' in sys.modules)); "
    result = subprocess.run(
        [sys.executable, "-c", watch + code, "calibrate", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "--from-mlflow" in result.stdout and result.stdout.splitlines()[-1] == "IMPORTED False False"
