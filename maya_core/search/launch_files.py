"""Writes the files that start a job on a real cluster: a Slurm script, a PyTorchJob for Kubernetes, and a SkyPilot task.

The files were checked against the schemas that docs/search.md names. Settings of your site (partition, image) are placeholders
that you fill in.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.run import get_use_env

from maya_core.errors import MayaError
from maya_core.launch import torchrun
from maya_core.launch.launchers import launcher_in
from maya_core.search.recipe import CheckedRecipe, Point, Program

# SkyPilot's names of accelerators, if they differ from the catalog's names in capitals.
SKY = {
    "a100": "A100-80GB",
    "a100-40gb": "A100",
    "rtx-pro-6000": "RTXPRO6000",
    "v100": "V100-32GB",
    "v100-pcie": "V100-32GB",
    "v100-16gb": "V100",
}
IMAGE = "your-registry/your-image:tag"
HEADER = "# Written by `maya size`."


def write_files(job: CheckedRecipe, point: Point, folder: Path) -> list[Path]:
    """Writes all three files to a folder that contains nothing else."""
    texts = {
        "job.slurm": slurm(job, point),
        "pytorchjob.yaml": _yaml(pytorchjob(job, point), _needed(job, point)),
        "sky.yaml": _yaml(skypilot(job, point)),
    }
    present = {path.name: path.read_text(errors="replace") if path.is_file() else None for path in _in(folder)}
    if other := sorted(name for name, text in present.items() if texts.get(name) != text):
        raise MayaError(
            f"--emit {folder} contains {other[0]}, which differs from what would be written: it may have been edited.",
            "Give a new or empty folder, or remove the file.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def _in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _yaml(content: dict[str, Any], note: str = "") -> str:
    return f"{HEADER}\n{note}" + yaml.safe_dump(content, sort_keys=False, width=200)


def _needed(job: CheckedRecipe, point: Point) -> str:
    """A comment that names what the image has to contain."""
    files = _elsewhere(_on_a_node(job.program(point), []))
    also = f", and {', '.join(files)} at the same path" if files else ""
    return f"# The image has to have your project as its working folder{also}.\n"


def _on_a_node(program: Program, rendezvous: list[str]) -> list[str]:
    """The command that every node runs, with torchrun's options for the rendezvous."""
    words = [_from_here(word) for word in program.words]
    args = torchrun.parse(words)
    if args is not None:
        launcher = ["torchrun"] if get_use_env(args) else ["python", "-m", "torch.distributed.launch"]
        kind = ["--no-python"] if args.no_python else ["-m"] if args.module else []
        return [*launcher, *rendezvous, *kind, args.training_script, *args.training_script_args]
    launcher_name = launcher_in(words)
    if launcher_name is None and program.nodes * program.gpus_per_node > 1:
        return ["torchrun", *rendezvous, "--no-python", *words]  # as it was emulated
    if launcher_name is not None and program.nodes > 1:
        raise MayaError(
            f"there are no launch files for {launcher_name} on {program.nodes} nodes: it starts other nodes itself, by a hostfile or ssh.",
            f"Start it as usual: {program.typed}. Or use torchrun in the command of the recipe.",
        )
    return words


def _from_here(word: str) -> str:
    """A path inside this folder, relative to it: on the cluster the folder is somewhere else."""
    path = Path(word)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else word


def _elsewhere(words: list[str]) -> list[str]:
    """The files in a command that are outside this folder."""
    return [word for word in words if Path(word).is_absolute() and Path(word).is_file()]


def _shell(words: list[str]) -> str:
    """A command for a shell, which expands the variables in it."""
    return " ".join(word if "$" in word else shlex.quote(word) for word in words)


def slurm(job: CheckedRecipe, point: Point) -> str:
    program = job.program(point)
    rendezvous = [
        f"--nnodes={program.nodes}", f"--nproc-per-node={program.gpus_per_node}", "--rdzv-backend=c10d",
        "--rdzv-id=$SLURM_JOB_ID", "--rdzv-endpoint=$head:29500",
    ]  # fmt: skip
    command = _shell(_on_a_node(program, rendezvous))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in program.environment]
    return "\n".join(
        [
            "#!/bin/bash",
            HEADER,
            f"#SBATCH --job-name={_dns(job.name)}",
            f"#SBATCH --nodes={program.nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={program.gpus_per_node}",
            "#SBATCH --exclusive",
            "#SBATCH --output=%x-%j.log",
            "# Add what your site needs: --partition, --account, --time.",
            "set -euo pipefail",
            *exports,
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export head",
            f"srun bash -c {shlex.quote(command)}",
            "",
        ]
    )


def pytorchjob(job: CheckedRecipe, point: Point) -> dict[str, Any]:
    """A job for Kubeflow's training operator, kubeflow.org/v1. It sets PET_NNODES, PET_NODE_RANK and the master address for torchrun."""
    program = job.program(point)
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": IMAGE,
        "command": _on_a_node(program, []),
        "env": [{"name": name, "value": value} for name, value in program.environment],
        "resources": {"limits": {"nvidia.com/gpu": program.gpus_per_node}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    template = {"spec": {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}}

    def replica(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "OnFailure", "template": template}

    replicas = {"Master": replica(1)}
    if program.nodes > 1:
        replicas["Worker"] = replica(program.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _dns(job.name)},
        "spec": {"nprocPerNode": str(program.gpus_per_node), "pytorchReplicaSpecs": replicas},
    }


def skypilot(job: CheckedRecipe, point: Point) -> dict[str, Any]:
    program = job.program(point)
    gpu = job.cluster_of(point).board or ""
    rendezvous = [
        "--nnodes=$SKYPILOT_NUM_NODES", "--nproc-per-node=$SKYPILOT_NUM_GPUS_PER_NODE",
        "--node-rank=$SKYPILOT_NODE_RANK", "--master-addr=$head", "--master-port=29500",
    ]  # fmt: skip
    words = _on_a_node(program, rendezvous)
    mounted = {path: f"$HOME/maya/{Path(path).name}" for path in _elsewhere(words)}
    command = _shell([mounted.get(word, word) for word in words])
    task: dict[str, Any] = {
        "name": _dns(job.name),
        "resources": {"accelerators": f"{SKY.get(gpu, gpu.upper())}:{program.gpus_per_node}"},
        "num_nodes": program.nodes,
        "workdir": ".",
        "run": f'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n{command}\n',
    }
    if mounted:
        task["file_mounts"] = {there.replace("$HOME", "~"): here for here, there in mounted.items()}
    if program.environment:
        task["envs"] = dict(program.environment)
    return task


def _dns(name: str) -> str:
    """A name that Kubernetes accepts: at most 63 lower-case letters, digits and '-'."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")[:63]
