"""Recipes: what they mean, and how mistakes in them are reported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from maya_here import refused
from search_here import MLP, job, write
from typer.testing import CliRunner

from maya_core import cli, installation
from maya_core.errors import MayaError
from maya_core.launch.fork_server import imports_of
from maya_core.search.recipe import read_recipe
from maya_core.search.shipped import find_recipe, new_recipe, shipped
from maya_core.search.sizing import sized


def test_a_point_is_a_program(tmp_path: Path) -> None:
    found = job(tmp_path)
    assert found.size == 20
    assert found.default == {"width": 64, "micro": 4194304, "recompute": "no"}
    words = found.program({"width": 128, "micro": 1048576, "recompute": "yes"}).words
    assert words[0] == "python" and words[2:] == (
        "--batch", "1048576", "--accumulate", "16", "--width", "128", "--recompute",
    )  # fmt: skip
    assert found.per_step(found.default) == {"samples_per_step": 16777216}


def test_a_knob_that_does_not_matter_is_at_its_first_value() -> None:
    found = find_recipe("gpt3-18b-64xh100")
    assert found.size == 1920
    point = found.default | {"tp": 1, "pp": 8, "chunks": 2, "sequence_parallel": "yes"}
    assert found.canonical(point)["sequence_parallel"] == "no" and found.canonical(point)["chunks"] == 2
    assert found.canonical(point | {"pp": 1})["chunks"] == 1
    assert found.program(point) == found.program(point | {"sequence_parallel": "no"})
    assert found.violated(point | {"tp": 8, "chunks": 4}) == "layers % (pp * chunks) == 0"


def test_the_cluster_may_be_turned(tmp_path: Path) -> None:
    text = MLP.replace("space:", "space:\n      gpu: [l4, h100]\n      network: [infiniband-ndr, roce-400]")
    found = job(tmp_path, text)
    point = found.default | {"gpu": "h100", "network": "roce-400"}
    assert found.cluster_of(point).gpu == "h100" and found.cluster_of(point).network == "roce-400"
    assert found.program(point) == found.program(found.default)  # the program does not see it


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_in_order(path: Path) -> None:
    found = read_recipe(path)
    assert found.violated(found.default) is None
    assert found.recipe.sizes.gpus and found.recipe.sizes.nodes
    assert 1 < sum(found.violated(point) is None for point in found.points()) <= found.size


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_a_shipped_recipe_names_the_packages_of_its_program(path: Path) -> None:
    """What its program and its launcher import, besides torch and the standard library."""
    found = read_recipe(path)
    words = found.program(found.default).words
    program = next(Path(word) for word in words if word.endswith(".py"))
    modules = {name.partition(".")[0] for name in imports_of(program)} | {words[0]} - {"torchrun", "python"}
    needed = {"megatron-core" if name == "megatron" else name for name in modules - sys.stdlib_module_names - {"torch"}}
    implied = {"accelerate"} if "Trainer" in program.read_text() else set()  # by the Trainer of transformers
    assert set(found.recipe.packages) == needed | implied


def without(*packages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these packages were not installed."""
    real = installation.version_of
    monkeypatch.setattr(installation, "version_of", lambda name: None if name in packages else real(name))


def test_all_recipes_are_listed_if_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    without("megatron-core", "peft", monkeypatch=monkeypatch)
    listed = CliRunner().invoke(cli.app, ["recipes"], env={"COLUMNS": "200"}).output
    for path in shipped():
        assert path.stem in listed
    assert len(re.findall(r"megatron-core *\n", listed)) == 3
    line = installation.how_to_install("megatron", packages=["peft"])
    assert f"To run those with missing packages: {line}\n" in listed


@pytest.mark.parametrize("command", [["check"], ["search"], ["size", "--tokens", "1e9"]], ids=lambda words: words[0])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without("deepspeed", "transformers", monkeypatch=monkeypatch)
    words = [command[0], "llama2-13b-zero3-8xa100-40gb", *command[1:]]
    said = refused(*words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert said.exit_code == 2
    assert (
        "the recipe llama2-13b-zero3-8xa100-40gb needs deepspeed and transformers, which are not installed. "
        f"Run: {installation.how_to_install('deepspeed', 'huggingface')}"
    ) in said.stderr


def test_a_missing_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MLP.replace("python {program}", "trochrun {program}"))
    assert read_recipe(path).size == 20  # the recipe itself is in order
    said = refused("check", str(path), cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert "mlp.yaml, line 3: command not found: 'trochrun'." in said.stderr


WRONG = {
    "unknown field": (("steps: 2", "stepz: 2"), 5, "stepz: Extra inputs are not permitted"),
    "unknown knob in the command": (("--width {{width}}", "--width {{wide}}"), 3, "there is no 'wide'"),
    "unknown knob in default": (("default: {{micro: 4194304}}", "default: {{macro: 1}}"), 14, "there is no knob 'macro'"),
    "no value of the knob": (("default: {{micro: 4194304}}", "default: {{micro: 3}}"), 14, "3 is not a value of the knob 'micro'"),
    "unknown name in an expression": (("rows // micro", "rows // macro"), 11, "there is no 'macro'"),
    "no expression": (("rows % micro == 0", "rows % micro =="), 12, "is not an expression"),
    "a knob that changes nothing": (("      width: [64, 128]", "      width: [64, 128]\n      idle: [1, 2]"), 9, "the knob 'idle' changes nothing"),
    "a value twice": (("[64, 128]", "[64, 64]"), 8, "occurs twice"),
    "unknown GPU": (("gpu: l4,", "gpu: l5,"), 4, "l5"),
    "missing script": (("{program}", "{program}.py"), 3, ".py does not exist"),
    "impossible parallelism": (("rows % micro == 0", "rows % micro == 1"), 12, "no configuration of the space is possible"),
    "impossible default": (("rows % micro == 0", "accumulate == 2"), 14, "the default configuration is not possible"),
    "a single step": (("steps: 2", "steps: 1"), 5, "greater than or equal to 2"),
    "not YAML": (("steps: 2", "steps: ["), 7, "not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_recipes_name_the_line(wrong: str, tmp_path: Path) -> None:
    (old, new), line, problem = WRONG[wrong]
    assert old in MLP
    with pytest.raises(MayaError) as raised:
        job(tmp_path, MLP.replace(old, new))
    assert problem in str(raised.value)
    assert f"mlp.yaml, line {line}:" in raised.value.problem


def test_no_recipe() -> None:
    with pytest.raises(MayaError, match="there is no recipe 'gpt5'"):
        find_recipe("gpt5")
    with pytest.raises(MayaError, match="no recipe at"):
        find_recipe("there/gpt5.yaml")


def test_a_recipe_is_of_the_command_it_is_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its numbers are, and whatever YAML would make of its words."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    command = [
        "deepspeed",
        "--num_nodes",
        "2",
        "--num_gpus=8",
        "train.py",
        "--batch-size",
        "1",
        "--opt",
        "{'a':1}",
        "#",
        "--tag",
        "a:b",
    ]
    assert CliRunner().invoke(cli.app, ["recipes", "new", "mine.yaml", "--", *command]).exit_code == 0
    found = read_recipe(Path("mine.yaml"))
    assert (found.recipe.cluster.nodes, found.recipe.cluster.gpus_per_node) == (2, 8)
    assert list(found.program(found.default).words) == command


def test_a_recipe_of_one_node_can_be_sized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    Path("mine.yaml").write_text(new_recipe(["torchrun", "--nproc-per-node", "8", "train.py"], "h100", 1, 8))
    found = read_recipe(Path("mine.yaml"))
    assert found.recipe.sizes.gpus == ["h100"] and found.recipe.sizes.nodes == [1, 2, 4]
    there = sized(found, "h100", 2)
    assert " ".join(there.program(there.default).words) == "torchrun --nnodes 2 --nproc-per-node 8 train.py"


def test_a_recipe_from_a_command(tmp_path: Path) -> None:
    script = write(tmp_path, "about: x", "train").with_suffix(".py")
    script.write_text("pass")
    command = [
        "torchrun",
        "--nnodes",
        "2",
        "--nproc-per-node=8",
        str(script),
        "--micro-batch-size",
        "8",
        "--lr",
        "3",
        "--token",
        "hunter2",
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(new_recipe(command, "h100", 2, 8))
    found = read_recipe(path)
    assert found.knobs["micro_batch_size"].choices == [4, 8, 16]
    assert found.default == {"micro_batch_size": 8}
    assert "hunter2" not in path.read_text()
    assert list(found.program(found.default).words) == [
        "torchrun", "--nnodes", "2", "--nproc-per-node=8", str(script), "--micro-batch-size", "8", "--lr", "3", "--token", "***",
    ]  # fmt: skip
