"""The wheel that is released: what it contains, and that a new environment in which only it is installed can do what the README promises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from maya_core.version import __version__

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
(TORCH,) = re.findall(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
# Commands that need what a new environment does not have. Each names it in one sentence.
MISSING = {
    "search llama3-8b-8xh100 --trials 1": "optuna is not installed.\nRun: pip install {search}",
    "size llama3-8b-8xh100 --tokens 1e9 --executor ray": "Ray is not installed.\nRun: pip install {ray}",
    "check llama2-13b-zero3-8xa100-40gb": "needs deepspeed and transformers, which are not installed.\nRun: pip install {deepspeed,huggingface}",
    "check llama2-7b-lora-l40s": "needs transformers, accelerate and peft, which are not installed.\nRun: pip install {huggingface} peft",
    "check mixtral-8x7b-64xh100": "needs megatron-core, which is not installed.\nRun: pip install {megatron}",
    "run -- deepspeed train.py": "deepspeed is not installed in the environment of `maya`. Run: pip install {deepspeed}",
    "run -- accelerate launch train.py": "accelerate is not installed in the environment of `maya`. Run: pip install {huggingface}",
    "run --mlflow -- python train.py": "MLflow is not installed.\nRun: pip install {mlflow}",
    "compare": "MLflow is not installed.\nRun: pip install {mlflow}",
    "mlflow upload folder": "MLflow is not installed.\nRun: pip install {mlflow}",
    "calibrate --from-mlflow maya": "MLflow is not installed.\nRun: pip install {mlflow}",
}
# Runs commands of `maya` in one process, because each start takes a second, and prints their exit codes and what they say.
MANY = """
import contextlib, io, json, sys
from maya_core.cli import entry
said = {}
for command in sys.argv[1:]:
    sys.argv = ["maya", *command.split()]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        try: entry()
        except SystemExit as ended: said[command] = [ended.code, printed.getvalue()]
print(json.dumps(said))
"""


def wheel_in(folder: Path) -> Path:
    """Builds the wheel by the command that the release uses."""
    subprocess.run(["make", "wheel", f"PYTHON={sys.executable}", f"DIST={folder}"], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A new virtual environment, used from a folder outside of the repository."""

    def __init__(self, folder: Path, **options: bool) -> None:
        self.bin, self.work = folder / "environment/bin", folder / "work"
        venv.create(folder / "environment", symlinks=True, **options)
        self.work.mkdir(exist_ok=True)
        ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        self.variables = {name: value for name, value in os.environ.items() if name not in ours}
        self.variables |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "COLUMNS": "120"}

    def run(self, *words: str, exit_code: int = 0) -> str:
        """What a command prints."""
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]], cwd=self.work, env=self.variables, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == exit_code, f"{' '.join(words)}\n{done.stdout}"
        return done.stdout

    def install(self, *words: str) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", "--no-compile", *words)

    def maya(self, words: str, exit_code: int = 0) -> str:
        said = self.run("maya", *words.split(), exit_code=exit_code)
        assert "Traceback" not in said, said
        return said

    def many(self, *commands: str) -> dict[str, tuple[int, str]]:
        """The exit codes of commands of `maya`, and what they print."""
        return {command: tuple(said) for command, said in json.loads(self.run("python", "-c", MANY, *commands)).items()}


@pytest.mark.slow
def test_what_the_wheel_contains(tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(wheel_in(tmp_path))
    _shows_the_readme_with_whole_addresses(wheel)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {"maya_launchers.pth"}
    for source, target in (("maya_core", "maya_core/"), ("integrations", ""), ("recipes", "maya_core/recipes/")):
        files = {path.relative_to(ROOT / source) for path in (ROOT / source).rglob("*") if path.is_file()}
        expected |= {f"{target}{path}" for path in files if path.suffix not in (".pyc", ".so", ".pth")}
    expected |= {f"maya_core/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert names == expected
    for part in (
        "maya_core/device/native/dispatch.cpp", "maya_core/device/native/device.h", "maya_core/simulator/clock.cpp",
        "maya_core/hardware/gpus.toml", "maya_core/predictor/profiles/gemm/h100.json", "maya_core/report/page/page.html",
        "maya_core/recipes/programs/llama.py", "maya_core/docs/faq.md", "maya_core/py.typed", "maya_mlflow/tracking.py",
    ):  # fmt: skip
        assert part in names
    assert not [name for name in names if "test" in Path(name).parts[0] or name.endswith((".png", ".svg", ".pyc"))]


def _shows_the_readme_with_whole_addresses(wheel: zipfile.ZipFile) -> None:
    """PyPI shows the description without the files that it points to."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    targets = re.findall(r"\]\((.*?)\)", wheel.read(metadata).decode())
    assert len(targets) > 30 and [target for target in targets if not target.startswith("https://")] == []
    assert any(target.endswith("/main/docs/images/terminal.png") for target in targets)


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Environment]:
    """An empty environment. It is removed after the test, because torch makes it large."""
    made = Environment(tmp_path, with_pip=True)
    yield made
    shutil.rmtree(made.bin.parent)


@pytest.mark.slow
def test_a_new_environment(new: Environment, tmp_path: Path) -> None:
    wheel = wheel_in(tmp_path)
    new.install(f"torch=={TORCH}")
    new.install("-c", str(CONSTRAINTS), str(wheel))
    _explains_itself(new, wheel)
    _names_what_is_missing(new, wheel)
    _runs_the_first_example_of_the_readme(new)
    _runs_an_included_recipe(new)
    _as_an_editable_installation(new, tmp_path / "editable")
    _without_torch(new)


def _explains_itself(new: Environment, wheel: Path) -> None:
    assert new.maya("--version").startswith(f"maya {__version__}, torch {TORCH}")
    doctor = new.maya("doctor -- torchrun --nproc-per-node 8 train.py")
    assert f"from the wheel {wheel}".replace(" ", "") in "".join(doctor.split())  # however its lines are broken
    assert doctor.endswith("Maya can run here.\n")
    assert "h100" in new.maya("gpus")
    assert "Frequent questions" in new.maya("help")
    assert "| `--gpus-per-node` |" in new.maya("help options")
    listed = new.maya("recipes")
    assert [name for name in RECIPES if name not in listed] == []
    assert f"To run those with missing packages: pip install '{wheel}[huggingface,megatron,deepspeed]' peft" in listed
    commands = re.findall("^## maya (.*)$", new.maya("help options"), re.MULTILINE)
    assert len(commands) > 15
    for command, (code, said) in new.many(*(f"{command} --help" for command in commands)).items():
        assert code == 0 and f"Usage: maya {command.removesuffix(' --help')} " in said, said


def _names_what_is_missing(new: Environment, wheel: Path) -> None:
    for command, (code, said) in new.many(*MISSING).items():
        assert code == 2
        assert re.sub(r"\{(.*)\}", lambda found: f"'{wheel}[{found[1]}]'", MISSING[command]) in said, said
    (line,) = [line for line in new.maya("search llama3-8b-8xh100", exit_code=2).splitlines() if "pip install" in line]
    would = subprocess.run(
        f"{line.removeprefix('Run: ')} --dry-run", shell=True, env=new.variables, cwd=new.work,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "Would install" in would.stdout and "optuna-" in would.stdout


def _runs_the_first_example_of_the_readme(new: Environment) -> None:
    command = "maya run --gpu h100 -- torchrun --nproc-per-node 8 examples/train_llama_fsdp2.py"
    assert f"    {command}\n" in (ROOT / "README.md").read_text()
    shutil.copy(ROOT / "examples/train_llama_fsdp2.py", new.work)
    said = new.maya(command.removeprefix("maya ").replace("examples/", ""))
    assert "step time" in said and "memory" in said
    assert new.maya("report maya-out --html page.html")
    assert (new.work / "page.html").stat().st_size > 100_000


def _runs_an_included_recipe(new: Environment) -> None:
    assert "ok" in new.maya("check llama3-8b-8xh100 --max-memory 79GiB")


def _as_an_editable_installation(new: Environment, folder: Path) -> None:
    """The same packages, with Maya from the folder of the repository."""
    editable = Environment(folder)
    (packages,) = (folder / "environment/lib").glob("python*/site-packages")
    (others,) = (new.bin.parent / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{others}\n")
    pip = ["-m", "pip", "--python", str(editable.bin / "python"), "install", "--quiet", "--no-deps"]
    new.run("python", *pip, "-e", str(ROOT))
    assert f"editable, from the folder {ROOT}".replace(" ", "") in "".join(editable.maya("doctor").split())
    assert f"optuna is not installed.\nRun: pip install -e '{ROOT}[search]'" in editable.maya(
        "search llama3-8b-8xh100", 2
    )
    assert "Frequent questions" in editable.maya("help")
    assert not (packages / "maya_core").exists()  # recipes and pages are those of the repository, not copies


def _without_torch(new: Environment) -> None:
    new.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "torch")
    assert "torch is not installed in this environment" in " ".join(new.maya("doctor", exit_code=1).split())
    for code, said in new.many("run -- torchrun train.py", "check llama3-8b-8xh100", "calibrate measure").values():
        assert code == 2
        assert "maya: torch is not installed in this environment.\nInstall it with: pip install " in said, said
