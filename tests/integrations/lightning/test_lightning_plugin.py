"""MayaEmulator in a process that continues afterwards: what it predicts, what it skips, and that it restores everything."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from integrations.lightning.lightning_net import BATCH, PARAMETERS, SAMPLES, loader, net
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from maya_lightning import MayaEmulator

from maya_core.errors import MayaError

DISTRIBUTIONS = [lightning.pytorch, pytorch_lightning]
MODULES = (
    "trainer.trainer",
    "trainer.connectors.accelerator_connector",
    "callbacks.model_checkpoint",
    "strategies.ddp",
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    before = surroundings()
    yield
    assert not torch.cuda.is_available()
    assert not torch.distributed.is_initialized()
    assert [one for one in surroundings() if one not in before] == []


def surroundings() -> tuple[Any, ...]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    watching = [finder for finder in sys.meta_path if type(finder).__module__.startswith("maya")]
    linear = torch.nn.functional.linear  # which ZeRO-3 replaces
    return (*sorted(environment.items()), sys.excepthook, torch.get_num_threads(), watching, linear)


def classes_of(package: ModuleType) -> dict[str, Any]:
    """Every attribute of Lightning's modules that the emulation touches, and of their classes."""
    found: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(f"{package.__name__}.{name}")
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.update({f"{name}.{key}.{attribute}": one for attribute, one in vars(value).items()})
    return {key: value for key, value in found.items() if "_abc_" not in key}


@pytest.mark.parametrize("package", DISTRIBUTIONS, ids=lambda package: package.__name__)
def test_an_emulated_fit_and_then_a_real_one(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = classes_of(package)
    model = net(package)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    emulator = MayaEmulator("a100", nodes=2, gpus_per_node=4)
    trainer = package.Trainer(
        max_epochs=2,
        strategy="ddp",
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        plugins=[emulator],
        profiler="simple",
        callbacks=[
            package.callbacks.EarlyStopping("val_loss"),
            package.callbacks.ModelCheckpoint(every_n_train_steps=1),
        ],
        logger=[package.loggers.CSVLogger("logs")],
    )
    trainer.fit(model, loader(), loader())

    prediction = emulator.prediction
    assert (prediction.world.size, prediction.world.nodes) == (8, 2)
    assert prediction.cluster.gpu == "a100"
    assert prediction.trace.steps == 3
    assert prediction.throughput.samples_per_step == 2 * BATCH * 8
    assert trainer.state.status.value == "finished"
    assert model.planned == SAMPLES // (BATCH * 8 * 2) * 2
    assert model.validated == 1  # one batch, after the last step
    assert list(tmp_path.iterdir()) == []  # no logs, no checkpoints, no profile
    told = capfd.readouterr()
    assert "maya: emulating 2 nodes of 4 x a100\n" in told.err
    assert "step time" in told.out
    assert "it/s" not in told.err + told.out
    assert "FIT Profiler Report" not in told.out

    assert {name: value.device.type for name, value in model.state_dict().items()} == dict.fromkeys(weights, "cpu")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert classes_of(package) == before
    assert trainer.test(model, loader()) == []
    assert "trainer.test is skipped" in capfd.readouterr().err

    real = package.Trainer(
        max_steps=60, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    real.fit(model, loader())
    assert float(real.callback_metrics["loss"]) < 1.5 < torch.log(torch.tensor(10.0))
    assert model.device.type == "cpu"

    model.zero_grad(set_to_none=True)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.fit(model, loader(), loader())  # a Trainer for emulated GPUs emulates again
    assert emulator.prediction.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert emulator.prediction.memory.fullest.by_category_bytes == prediction.memory.fullest.by_category_bytes
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def fit(strategy: Any = "auto", *, precision: Any = "32-true", model: Any = None, **options: Any) -> MayaEmulator:
    emulator = MayaEmulator("h100", **options)
    trainer = lightning.pytorch.Trainer(
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        plugins=[emulator],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(net(lightning.pytorch) if model is None else model, loader())
    return emulator


def parameter_bytes(emulator: MayaEmulator) -> int:
    return emulator.prediction.memory.ranks[0].by_category_bytes["parameters"]


@pytest.mark.parametrize("start", ["ddp", "ddp_spawn", "ddp_notebook", "ddp_find_unused_parameters_true"])
def test_ddp_however_its_processes_would_be_started(start: str) -> None:
    emulator = fit(start, gpus_per_node=2)
    assert emulator.prediction.world.size == 2
    assert any(row.op == "all_reduce" for row in emulator.prediction.communication)


def test_one_gpu_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    emulator = MayaEmulator()
    trainer = lightning.pytorch.Trainer(max_epochs=1, plugins=[emulator], logger=False, enable_checkpointing=False)
    trainer.fit(net(lightning.pytorch), loader())
    assert emulator.prediction.world.size == 1
    assert emulator.prediction.communication == []
    assert (
        "1 node of 1 x h100, the default GPU, as requested by devices='auto' and num_nodes=1" in capfd.readouterr().err
    )


def test_precision_and_sharding_show_in_memory() -> None:
    full = parameter_bytes(fit())
    assert full >= 4 * PARAMETERS
    assert parameter_bytes(fit(precision="bf16-true")) == pytest.approx(full / 2, rel=0.05)
    assert parameter_bytes(fit("fsdp", gpus_per_node=4)) == pytest.approx(full / 4, rel=0.1)


def test_the_trainers_own_devices_and_nodes() -> None:
    emulator = MayaEmulator("h100")
    trainer = lightning.pytorch.Trainer(
        devices=[0, 2], num_nodes=3, strategy=FSDPStrategy(), plugins=[emulator], max_epochs=1, logger=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(net(lightning.pytorch), loader())
    assert (emulator.prediction.world.size, emulator.prediction.world.nodes) == (6, 3)


def test_model_parallel() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def configure_model() -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model.layers, model.device_mesh["tensor_parallel"], plan)
        fully_shard(model.layers, mesh=model.device_mesh["data_parallel"])

    model = net(lightning.pytorch)
    model.configure_model = configure_model
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    emulator = fit(strategy, precision="bf16-true", model=model, gpus_per_node=4)
    assert emulator.prediction.world.size == 4
    assert type(model.layers).__name__ == "Sequential"  # FSDP2 had made it another class
    assert not hasattr(model.layers[0].weight, "device_mesh")
    assert parameter_bytes(emulator) < 2 * PARAMETERS / 3


@pytest.mark.parametrize("stage", ["1", "2_offload", "3", "3_offload"])
def test_deepspeed(stage: str) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    model = net(lightning.pytorch)
    kind = DeepSpeedCPUAdam if "offload" in stage else FusedAdam
    model.configure_optimizers = lambda: kind(model.parameters(), lr=1e-3)
    emulator = fit(f"deepspeed_stage_{stage}", precision="bf16-mixed", model=model, gpus_per_node=4)
    assert emulator.prediction.world.size == 4
    assert emulator.prediction.trace.steps == 3
    optimizer = emulator.prediction.memory.fullest.by_category_bytes.get("optimizer_state", 0)
    # Master weights and two moments in float32, as the ZeRO paper counts; buffers are rounded up to 512 bytes.
    assert optimizer == (0 if "offload" in stage else pytest.approx(12 * PARAMETERS / 4, rel=0.02))
    gathers = {row.op for row in emulator.prediction.communication}
    assert any("all_gather" in op for op in gathers)
    assert model.layers[0].weight.shape == (256, 64)  # ZeRO-3 had taken it apart


def test_a_model_too_big_says_so_and_leaves_nothing() -> None:
    model = net(lightning.pytorch)
    model.training_step = lambda batch, batch_idx: torch.empty(100 * 2**30, device=model.device).sum()
    emulator = MayaEmulator("h100")
    trainer = lightning.pytorch.Trainer(max_epochs=1, plugins=[emulator], logger=False, enable_checkpointing=False)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.fit(model, loader())
    assert not emulator.prediction.memory.fits


def fabric_steps(fabric: Any) -> Iterator[tuple[Any, Any]]:
    """A loop of the user's own: model and optimizer after each step."""
    fabric.launch()
    module = torch.nn.Linear(64, 64)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    for _ in range(100):
        fabric.backward(model(torch.ones(8, 64, device=fabric.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        yield model, optimizer


def test_fabric_in_a_block() -> None:
    with MayaEmulator("a100", gpus_per_node=4) as emulator:
        list(fabric_steps(Fabric(strategy="ddp", precision="bf16-mixed", plugins=[emulator])))
    assert emulator.prediction.world.size == 4
    assert emulator.prediction.trace.steps == 3


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_compiled_layers_that_fsdp_shards() -> None:
    """FSDP breaks the graph around each layer, and dynamo goes on with whatever is called next: Maya's functions are none of it."""
    with MayaEmulator("a100", gpus_per_node=4) as emulator:
        fabric = Fabric(strategy=FabricFSDP(auto_wrap_policy={torch.nn.Linear}), plugins=[emulator])
        fabric.launch()
        model = fabric.setup_module(torch.compile(Layers()))
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        while True:
            fabric.backward(model(torch.ones(8, 64, device=fabric.device)).sum())
            optimizer.step()
            optimizer.zero_grad()
    told = [caveat for caveat in emulator.prediction.caveats if "torch.compile" in caveat]
    assert any("torch/distributed/fsdp" in caveat for caveat in told)
    assert not [caveat for caveat in told if "maya" in caveat or "device/shim" in caveat]


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_writes_neither_weights_nor_logs(package: str, tmp_path: Path) -> None:
    fabric_package = importlib.import_module(package)
    loggers = importlib.import_module(f"{package}.loggers")
    (tmp_path / "model.ckpt").write_text("the user's")
    with MayaEmulator("a100") as emulator:
        fabric = fabric_package.Fabric(plugins=[emulator], loggers=[loggers.CSVLogger(tmp_path / "logs")])
        for step, (model, optimizer) in enumerate(fabric_steps(fabric)):
            fabric.log("loss", 1.0, step=step)
            fabric.save(tmp_path / "model.ckpt", {"model": model, "optimizer": optimizer})
    assert [path.name for path in tmp_path.iterdir()] == ["model.ckpt"]
    assert (tmp_path / "model.ckpt").read_text() == "the user's"
    real = fabric_package.Fabric(accelerator="cpu", devices=1, loggers=[loggers.CSVLogger(tmp_path / "logs")])
    real.log("loss", 1.0, step=0)
    real.save(tmp_path / "model.ckpt", {"model": torch.nn.Linear(2, 2)})
    assert set(torch.load(tmp_path / "model.ckpt")["model"]) == {"weight", "bias"} and (tmp_path / "logs").is_dir()


def test_what_a_broken_off_step_had_switched_off_is_on_again() -> None:
    """The emulation ends inside a step of two optimizers, of which one has the other's parameters switched off."""

    class Two(lightning.pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.parts = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)])
            self.parts[0].bias.requires_grad_(False)

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.parts[1](self.parts[0](batch[0])).sum())
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([p for p in part.parameters() if p.requires_grad], 0.1) for part in self.parts]

    model = Two()
    before = {name: value.requires_grad for name, value in model.named_parameters()}
    assert fit(model=model).prediction.trace.steps == 3
    assert {name: value.requires_grad for name, value in model.named_parameters()} == before
    assert model._param_requires_grad_state == {}


def test_a_training_without_an_emulation_has_lightnings_own_rules() -> None:
    class Plateau(type(net(lightning.pytorch))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "no_such_loss"}}

    real = lightning.pytorch.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )  # fmt: skip
    with pytest.raises(MisconfigurationException, match="no_such_loss"):
        real.fit(Plateau(), loader())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda: {"plugins": [MayaEmulator(), MayaEmulator("a100")]}, "two MayaEmulators"),
        (lambda: {"plugins": [MayaEmulator("h999")]}, "unknown GPU 'h999'"),
        (lambda: {"plugins": [MayaEmulator(nodes=0)]}, "nodes=0"),
        (lambda: {"plugins": [MayaEmulator()], "accelerator": "cpu"}, "accelerator='cpu'"),
        (
            lambda: {"strategy": DDPStrategy(cluster_environment=LightningEnvironment()), "plugins": [MayaEmulator()]},
            "DDPStrategy already has a cluster environment, LightningEnvironment",
        ),
    ],
)
def test_bad_use(arguments: Any, sentence: str) -> None:
    with pytest.raises(MayaError, match=sentence.replace("(", r"\(")):
        lightning.pytorch.Trainer(**arguments())


def test_an_emulator_is_for_one_trainer() -> None:
    emulator = fit()
    trainer = lightning.pytorch.Trainer(max_epochs=1, plugins=[emulator], logger=False, enable_checkpointing=False)
    with pytest.raises(MayaError, match="had already ended when the Trainer was created"):
        trainer.fit(net(lightning.pytorch), loader())
    with pytest.raises(MayaError, match="no prediction yet"):
        MayaEmulator().prediction  # noqa: B018
    MayaEmulator().session.drop()


def test_trainings_beside_are_real(tmp_path: Path) -> None:
    """A CPU Trainer while an emulation waits for its own."""
    emulator = MayaEmulator()
    real = lightning.pytorch.Trainer(
        accelerator="cpu", max_steps=2, default_root_dir=tmp_path, callbacks=[ThroughputMonitor(lambda batch: BATCH)],
        logger=CSVLogger(tmp_path), enable_progress_bar=False,
    )  # fmt: skip
    model = net(lightning.pytorch)
    real.fit(model, loader(), loader())
    assert real.state.status == TrainerStatus.FINISHED
    assert model.validated > 0
    emulator.session.drop()


def test_callbacks_keep_quiet_only_under_emulation() -> None:
    hooks = EarlyStopping.on_train_epoch_end, ModelCheckpoint.on_train_batch_end
    emulator = MayaEmulator()
    assert (EarlyStopping.on_train_epoch_end, ModelCheckpoint.on_train_batch_end) != hooks
    emulator.session.drop()
    assert (EarlyStopping.on_train_epoch_end, ModelCheckpoint.on_train_batch_end) == hooks
