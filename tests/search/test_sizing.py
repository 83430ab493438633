"""`maya size`: clusters, and the files that start a job on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from search_here import PROGRAM, write

from maya_core.errors import MayaError
from maya_core.search import launch_files
from maya_core.search.recipe import Program, read_recipe
from maya_core.search.shipped import find_recipe
from maya_core.search.sizing import sized

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")

RANKS = """
    about: A small network on several GPUs.
    command: torchrun --nnodes {{nodes}} --nproc-per-node {{gpus_per_node}} {program} --batch {{batch}} --width 1024
    environment: {{NCCL_DEBUG: WARN}}
    cluster: {{gpu: h100, nodes: 1, gpus_per_node: 2}}
    steps: 2
    constants: {{rows: 1048576}}
    values: {{batch: rows // gpus}}
    require: [nodes < 4]
    tokens_per_step: rows
    sizes: {{gpus: [h100, a100], nodes: [1, 2, 4]}}
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sized")
    write(folder, RANKS, "ranks")
    words = [
        MAYA,
        "size",
        "ranks.yaml",
        "--tokens",
        "1e12",
        "--deadline",
        "300h",
        "--emit",
        "files",
        "--study",
        "study",
    ]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_cheapest_that_works_comes_first(told: tuple[Path, str]) -> None:
    rows = [line.split() for line in told[1].splitlines() if " x " in line]
    assert len(rows) == 6
    costs = [
        float(row[4 if row[4].startswith("$") else 5].replace("$", "").replace(",", ""))
        for row in rows
        if "works" in row
    ]
    assert len(costs) == 3 and costs == sorted(costs)
    assert sum("cannot" in row for row in rows) == 2  # four nodes, which `require` excludes
    assert "--nproc-per-node 2" in told[1]


# As the three say what they take: sbatch(1); kubeflow.org/v1 PyTorchJob; SkyPilot's task.
PYTORCHJOB: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object", "properties": {"name": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}}, "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["pytorchReplicaSpecs"],
            "additionalProperties": False,
            "properties": {
                "nprocPerNode": {"type": "string"},
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "required": ["Master"],
                    "propertyNames": {"enum": ["Master", "Worker"]},
                    "additionalProperties": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["replicas", "template"],
                        "properties": {
                            "replicas": {"type": "integer", "minimum": 1},
                            "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                            "template": {
                                "type": "object",
                                "required": ["spec"],
                                "properties": {
                                    "spec": {
                                        "type": "object",
                                        "required": ["containers"],
                                        "properties": {
                                            "containers": {
                                                "type": "array",
                                                "minItems": 1,
                                                "items": {
                                                    "type": "object",
                                                    "required": ["name", "image"],
                                                    "properties": {
                                                        "name": {"const": "pytorch"},
                                                        "image": {"type": "string"},
                                                        "command": {"type": "array", "items": {"type": "string"}},
                                                        "env": {
                                                            "type": "array",
                                                            "items": {
                                                                "type": "object",
                                                                "required": ["name", "value"],
                                                                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
                                                            },
                                                        },
                                                        "resources": {
                                                            "type": "object",
                                                            "properties": {"limits": {"type": "object", "required": ["nvidia.com/gpu"]}},
                                                        },
                                                    },
                                                },
                                            }
                                        },
                                    }
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}  # fmt: skip
SKYPILOT: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["run"],
    "properties": {
        "name": {"type": "string"},
        "workdir": {"type": "string"},
        "num_nodes": {"type": "integer", "minimum": 1},
        "resources": {"type": "object", "additionalProperties": False, "properties": {"accelerators": {"type": "string", "pattern": "^[A-Z0-9-]+:[0-9]+$"}}},
        "file_mounts": {"type": "object", "additionalProperties": {"type": "string"}},
        "envs": {"type": "object", "additionalProperties": {"type": "string"}},
        "run": {"type": "string"},
        "setup": {"type": "string"},
    },
}  # fmt: skip


def test_the_files(told: tuple[Path, str]) -> None:
    folder = told[0] / "files"
    job = yaml.safe_load((folder / "pytorchjob.yaml").read_text())
    jsonschema.validate(job, PYTORCHJOB)
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["env"] == [{"name": "NCCL_DEBUG", "value": "WARN"}]
    assert container["command"][:2] == ["torchrun", str(PROGRAM)]
    task = yaml.safe_load((folder / "sky.yaml").read_text())
    jsonschema.validate(task, SKYPILOT)
    assert task["num_nodes"] in (1, 2) and task["envs"] == {"NCCL_DEBUG": "WARN"}
    script = folder / "job.slurm"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "#SBATCH --gpus-per-node=2" in script.read_text()


@pytest.mark.parametrize("name", ["gpt3-18b-64xh100", "llama2-7b-lora-l40s", "llama2-13b-zero3-8xa100-40gb"])
def test_files_of_shipped_recipes(name: str, tmp_path: Path) -> None:
    job = find_recipe(name)
    for path in launch_files.write_files(job, job.default, tmp_path / "files"):
        assert path.stat().st_size
    jsonschema.validate(yaml.safe_load((tmp_path / "files/pytorchjob.yaml").read_text()), PYTORCHJOB)
    jsonschema.validate(yaml.safe_load((tmp_path / "files/sky.yaml").read_text()), SKYPILOT)
    launch_files.write_files(job, job.default, tmp_path / "files")  # the same ones
    edited = (tmp_path / "files/job.slurm").read_text().replace("# Add what", "#SBATCH --partition=mine\n# Add what")
    (tmp_path / "files/job.slurm").write_text(edited)
    with pytest.raises(MayaError, match=r"contains job\.slurm, which differs from what would be written"):
        launch_files.write_files(job, job.default, tmp_path / "files")
    assert (tmp_path / "files/job.slurm").read_text() == edited


def test_another_cluster(tmp_path: Path) -> None:
    job = read_recipe(write(tmp_path, RANKS, "ranks"))
    there = sized(job, "a100", 3)
    program = there.program(there.default)
    assert program.nodes == 3 and program.words[2] == "3" and program.words[-3] == str(1048576 // 6)


def test_what_a_recipe_turns_or_pays_is_of_its_own_cluster(tmp_path: Path) -> None:
    text = RANKS.replace("gpus_per_node: 2}}", "gpus_per_node: 2, price_per_gpu_hour: 1.5, network: roce-400}}")
    turned = text.replace("constants:", "space: {{gpu: [h100, h200], nodes: [1, 2]}}\n    constants:")
    for job in (read_recipe(write(tmp_path, one, "ranks")) for one in (text, turned)):
        own, other = sized(job, "h100", 3), sized(job, "b200", 3)
        for there, gpu in ((own, "h100"), (other, "b200")):
            spec = there.cluster_of(there.default)
            assert (spec.board, spec.nodes, spec.gpus_per_node) == (gpu, 3, 2)
            assert there.program(there.default).nodes == 3
        assert own.cluster_of(own.default).price_per_gpu_hour == 1.5
        assert other.cluster_of(other.default).price_per_gpu_hour is None
        assert other.cluster_of(other.default).network is None
    alone = read_recipe(write(tmp_path, text.replace(", gpus_per_node: 2", ""), "ranks"))
    assert sized(alone, "b200", 1).program({}).gpus_per_node == 1


LAUNCHED = {
    "torchrun --nnodes 2 --nproc-per-node 8 train.py --a 1": "torchrun R train.py --a 1",
    "torchrun --nnodes 2 --nproc-per-node 8 -m pkg.train --a 1": "torchrun R -m pkg.train --a 1",
    "torchrun --nnodes 2 --nproc-per-node 8 --no-python bash run.sh b": "torchrun R --no-python bash run.sh b",
    "python -m torch.distributed.launch --nproc-per-node 8 train.py": "python -m torch.distributed.launch R train.py",
    "python train.py --a 1": "torchrun R --no-python python train.py --a 1",
}


@pytest.mark.parametrize("typed", LAUNCHED)
def test_what_a_node_runs(typed: str) -> None:
    program = Program(words=tuple(typed.split()), environment=(), gpus_per_node=8, nodes=2, steps=2)
    assert " ".join(launch_files._on_a_node(program, ["R"])) == LAUNCHED[typed]


def test_a_launcher_with_ways_of_its_own() -> None:
    words = ("deepspeed", "--num_gpus", "8", "train.py")
    one = Program(words=words, environment=(), gpus_per_node=8, nodes=1, steps=2)
    assert launch_files._on_a_node(one, ["R"]) == list(words)
    with pytest.raises(MayaError, match="no launch files for deepspeed on 2 nodes"):
        launch_files._on_a_node(one.model_copy(update={"nodes": 2}), ["R"])


def test_files_of_the_command_get_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From below this folder with it, others by a mount."""
    monkeypatch.chdir(tmp_path)
    job = find_recipe("llama3-8b-8xh100")
    task = launch_files.skypilot(job, job.default)
    ((there, here),) = task["file_mounts"].items()
    assert there == "~/maya/llama.py" and Path(here).is_file() and "$HOME/maya/llama.py" in task["run"]
    monkeypatch.chdir(Path(here).parent)
    inside = launch_files.skypilot(job, job.default)
    assert "file_mounts" not in inside and " llama.py " in inside["run"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the length of the training is missing"),
        (["--tokens", "1e9", "--nodes", "two"], "--nodes two: these are not numbers"),
        (["--tokens", "1e9", "--gpu", "h1000"], "h1000"),
        (["--tokens", "1e9", "--deadline", "soon"], "--deadline soon: it must be a time"),
    ],
)
def test_bad_use(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from maya_here import refused

    write(tmp_path, RANKS, "ranks")
    found = refused("size", "ranks.yaml", *words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert found.exit_code == 2 and said in found.stderr
