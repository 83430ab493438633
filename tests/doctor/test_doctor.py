"""`maya doctor`: what it says of this environment, and of environments in which something is missing or wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from maya_here import refused
from typer.testing import CliRunner

from maya_core.cli import app
from maya_core.doctor import command, environment, packages
from maya_core.doctor.findings import Finding, State, can_run
from maya_core.hardware import toml
from maya_core.installation import FOR_CONTRIBUTORS, how_to_install
from maya_core.torch_seam.version import TRITON, Torch, installed

ROOT = Path(__file__).parents[2]


def doctor(*words: str, exit_code: int = 0) -> dict[str, dict[str, Any]]:
    """Its findings by subject."""
    done = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert done.exit_code == exit_code, done.output
    report = json.loads(done.output)
    assert report["ok"] is (exit_code == 0)
    return {finding["subject"]: finding for finding in report["findings"]}


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has neither Maya nor torch."""
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python"


def test_this_environment() -> None:
    found = doctor()
    torch = installed()
    assert found["torch"]["found"].startswith(
        f"{torch.text}, {f'built for CUDA {torch.cuda}' if torch.cuda else 'CPU build'}, "
    )
    assert sys.executable in found["Python"]["found"]
    assert found["C++ compiler"]["state"] == found["Python headers"]["state"] == found["autoload"]["state"] == "ok"
    assert found["optuna"] == {
        "part": "Optional packages", "subject": "optuna", "state": "ok", "advice": "",
        "found": packages.version_of("optuna"),
    }  # fmt: skip


def test_torch_is_not_imported() -> None:
    code = (
        "import sys\nfrom maya_core.cli import app\ntry: app(['doctor'])\nexcept SystemExit as e: print('exit', e.code)\n"
        "assert 'torch' not in sys.modules\nprint('not imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("Maya can run here.\nexit 0\nnot imported\n"), done.stdout + done.stderr


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++")
    found = doctor(exit_code=1)["C++ compiler"]
    assert found["state"] == "problem"
    assert "'/no/such/g++' was not found" in found["found"]
    assert "apt-get install g++" in found["advice"]


def test_an_old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = executable(tmp_path / "g++", '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 7.5.0" || exit 1\n')
    monkeypatch.setenv("CXX", str(old))
    assert doctor(exit_code=1)["C++ compiler"]["found"] == f"g++ 7.5.0, {old}: it does not know C++20"


def test_autoload_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert doctor(exit_code=1)["autoload"]["advice"].startswith("Unset TORCH_DEVICE_BACKEND_AUTOLOAD")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MAYA_CACHE_DIR", str(tmp_path / "file/cache"))
    found = doctor(exit_code=1)
    assert found["folder"]["found"] == f"{tmp_path}/file/cache: {tmp_path}/file is not writable"
    assert found["folder"]["advice"] == "Point MAYA_CACHE_DIR at a folder that you may write to."


def test_nothing_is_compiled_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAYA_CACHE_DIR", str(tmp_path / "new"))
    found = doctor()
    assert found["folder"]["found"] == f"{tmp_path}/new, 0 B"
    assert "the first run does it" in found["device"]["found"]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("torch", "state", "words"),
    [
        (Torch("2.13.0+cu130", Path("/torch"), "13.0"), State.OK, "built for CUDA 13.0"),
        (Torch("2.9.1", Path("/torch"), None), State.PROBLEM, "torch 2.9.1 is not supported"),
        (Torch("2.14.0", Path("/torch"), None), State.OK, "2.14.0, CPU build"),
    ],
)
def test_versions_of_torch(torch: Torch, state: State, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.torch_versions, "installed", lambda: torch)
    first, *rest = environment.torch()
    assert first.state is state
    assert words in first.found
    if torch.text == "2.14.0":
        assert "Distributed and compiled programs were compared with 2.13 only" in rest[0].found


def test_another_triton_than_the_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real, released = packages.version_of, TRITON[installed().version]
    monkeypatch.setattr(packages, "version_of", lambda name: "3.1.0" if name == "triton" else real(name))
    found = next(finding for finding in packages.optional_packages() if finding.subject == "triton")
    assert found.state is State.WARNING
    assert f"is released with {released}" in found.found
    assert found.advice == f"pip install triton=={released}"


def test_what_is_not_installed_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"optuna": "4.6.0", "mlflow": None}
    real = packages.version_of
    monkeypatch.setattr(packages, "version_of", lambda name: versions[name] if name in versions else real(name))
    found = {finding.subject: finding for finding in packages.optional_packages()}
    assert found["optuna"] == Finding(
        "optuna", "4.6.0; Maya was checked on >=5", State.WARNING, how_to_install("search")
    )
    assert found["mlflow"].state is State.ABSENT
    assert found["mlflow"].advice == f"for `--mlflow`, `maya compare`: {how_to_install('mlflow')}"
    assert can_run({"Optional packages": list(found.values())})


def test_every_extra_for_users_has_a_purpose() -> None:
    extras = toml.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == packages.PURPOSES.keys() | set(FOR_CONTRIBUTORS)


# ---- a command ----


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("python train.py", "`maya run` uses it for a bare 'python'"),
        ("train.py --lr 1", "`maya run` uses it for a bare 'train.py'"),
        ("torchrun --nproc-per-node 8 train.py", "`maya run` starts the ranks of torchrun itself"),
        ("/elsewhere/bin/python -m torch.distributed.run train.py", "`maya run` starts the ranks of python itself"),
    ],
)
def test_commands_that_use_the_python_of_maya(words: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    found = doctor("--", *words.split())["interpreter"]
    assert found["found"] == f"{sys.executable}, the one of `maya`: {reason}"


def test_another_python_on_path_is_not_used(other_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(other_python.parent), prepend=":")
    found = doctor("--", "python", "train.py")["interpreter"]
    assert found["found"].startswith(f"{sys.executable}, the one of `maya`: ")
    assert found["found"].endswith(f"; the packages of {other_python} are not used")


def test_the_python_of_another_environment(other_python: Path) -> None:
    found = doctor("--", str(other_python), "train.py", exit_code=1)
    assert found["interpreter"]["found"] == f"{other_python}: the command names it"
    assert found["its Maya"]["state"] == found["its torch"]["state"] == "problem"
    assert found["its Maya"]["advice"].startswith(f"Run: {other_python} -m pip install ")


def test_a_console_script_of_another_environment(other_python: Path) -> None:
    script = executable(other_python.with_name("accelerate"), f"#!{other_python}\nprint('never run')\n")
    found = doctor("--", str(script), "launch", "train.py", exit_code=1)
    assert found["interpreter"]["found"] == f"{other_python}: the first line of {script} names it"


def test_a_console_script_behind_a_long_path(other_python: Path) -> None:
    """pip writes this form if the path of the interpreter has spaces or is too long."""
    script = executable(other_python.with_name("long"), f"#!/bin/sh\n'''exec' {other_python} \"$0\" \"$@\"\n' '''\n")
    assert command.shebang(script) == (str(other_python),)


def test_the_first_python_on_path(other_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(other_python.parent), prepend=":")
    script = executable(tmp_path / "train", "#!/usr/bin/env python3\n")
    found = doctor("--", str(script), exit_code=1)
    assert found["interpreter"]["found"].startswith(f"{other_python.with_name('python3')}: the first line of ")
    shell = executable(tmp_path / "train.sh", "#!/bin/bash\npython train.py\n")
    found = doctor("--", str(shell))  # what it starts is not known, so this is a warning
    assert f"The first on PATH is {other_python}" in found["interpreter"]["found"]
    assert found["its Maya"]["state"] == "warning"


def test_a_runner_of_environments(other_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    executable(tmp_path / "uv", f'#!/bin/sh\necho "$*" > {said}\nshift 3\nexec {other_python} "$@"\n')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = doctor("--", "uv", "run", "--frozen", "train.py", exit_code=1)
    assert found["its Python"]["found"].endswith(str(other_python))
    assert said.read_text().startswith("run --frozen python -c ")


def test_a_python_that_cannot_be_asked(tmp_path: Path) -> None:
    broken = executable(tmp_path / "python", "#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    found = doctor("--", str(broken), "train.py", exit_code=1)["its packages"]
    assert found["found"] == "not known: no such library"


def test_an_option_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused("doctor", "--jsn", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert said.stderr.startswith("maya: there is no option --jsn. `maya doctor --help` lists them")


def test_a_command_that_does_not_exist() -> None:
    assert doctor("--", "pyton", "train.py", exit_code=1)["command"]["found"] == "command not found: 'pyton'."
