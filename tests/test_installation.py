"""The command that installs an extra of Maya, for each way in which Maya itself may have been installed."""

from __future__ import annotations

import json
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from maya_core.installation import Installation

METADATA = """Metadata-Version: 2.4
Name: maya-emulator
Version: 0.1.0
Provides-Extra: compile
Provides-Extra: deepspeed
Provides-Extra: dev
Provides-Extra: huggingface
Provides-Extra: search
Requires-Dist: numpy
Requires-Dist: optuna>=5; extra == 'search'
Requires-Dist: cmaes; extra == "search"
Requires-Dist: triton<3.8,>=3.7; extra == 'compile'
Requires-Dist: transformers>=5; extra == 'huggingface'
Requires-Dist: accelerate>=1.15; extra == 'huggingface'
Requires-Dist: deepspeed>=0.19; extra == 'deepspeed'
Requires-Dist: peft; extra == 'dev'
"""


def installed(folder: Path, origin: dict[str, Any] | None) -> Installation:
    """Maya as an installer leaves it behind: a dist-info folder, with direct_url.json if it did not come from an index."""
    info = folder / "site-packages/maya_emulator-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    return Installation(Distribution.at(info), folder / "site-packages/maya_core")


def test_from_an_index(tmp_path: Path) -> None:
    maya = installed(tmp_path, None)
    assert maya.install_line(["search"]) == "pip install 'maya-emulator[search]'"
    assert maya.upgrade_advice() == "Upgrade with: pip install -U maya-emulator"
    assert str(maya) == "from a package index"


def test_editable(tmp_path: Path) -> None:
    source = tmp_path / "my checkout"
    source.mkdir()
    maya = installed(tmp_path, {"url": source.as_uri(), "dir_info": {"editable": True}})
    assert maya.install_line(["search"]) == f"pip install -e '{source}[search]'"
    assert maya.upgrade_advice() == f"Update the sources in {source}."
    assert str(maya) == f"editable, from the folder {source}"


def test_from_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "maya"
    source.mkdir()
    maya = installed(tmp_path, {"url": source.as_uri(), "dir_info": {}})
    assert maya.install_line(["search"]) == f"pip install '{source}[search]'"
    assert maya.upgrade_advice() == f"Update the sources in {source}, and install it again: pip install {source}"


def test_from_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "maya_emulator-0.1.0-py3-none-any.whl"
    wheel.touch()
    maya = installed(tmp_path, {"url": wheel.as_uri(), "archive_info": {}})
    assert maya.install_line(["search"]) == f"pip install '{wheel}[search]'"
    assert maya.upgrade_advice() == "Install a newer wheel of Maya."


def test_from_a_wheel_that_is_gone(tmp_path: Path) -> None:
    wheel = tmp_path / "maya_emulator-0.1.0-py3-none-any.whl"
    maya = installed(tmp_path, {"url": wheel.as_uri(), "archive_info": {}})
    assert maya.install_line(["search"]) == "pip install 'optuna>=5' cmaes"
    assert (
        maya.install_line(packages=["transformers", "peft"]) == "pip install 'transformers>=5' 'accelerate>=1.15' peft"
    )
    assert str(maya) == f"from the wheel {wheel}, which is gone"


@pytest.mark.parametrize(
    ("vcs_info", "address"),
    [
        ({"vcs": "git", "commit_id": "0a1b2c"}, "git+https://host/maya.git@0a1b2c"),
        ({"vcs": "git", "commit_id": "0a1b2c", "requested_revision": "v1"}, "git+https://host/maya.git@v1"),
    ],
)
def test_from_a_repository(tmp_path: Path, vcs_info: dict[str, str], address: str) -> None:
    maya = installed(tmp_path, {"url": "https://host/maya.git", "vcs_info": vcs_info})
    assert maya.install_line(["search"]) == f"pip install 'maya-emulator[search] @ {address}'"


def test_from_the_folder_of_a_repository(tmp_path: Path) -> None:
    origin = {"url": "https://host/all.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b2c"}, "subdirectory": "maya"}
    line = installed(tmp_path, origin).install_line(["ray"])
    assert line == "pip install 'maya-emulator[ray] @ git+https://host/all.git@0a1b2c#subdirectory=maya'"


def test_from_an_archive_on_the_web(tmp_path: Path) -> None:
    maya = installed(tmp_path, {"url": "https://host/maya-0.1.0.tar.gz", "archive_info": {}})
    assert maya.install_line(["search"]) == "pip install 'maya-emulator[search] @ https://host/maya-0.1.0.tar.gz'"


def test_imported_from_a_checkout_without_being_installed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    maya = Installation(None, tmp_path / "maya_core")
    assert maya.install_line(["search"]) == f"pip install -e '{tmp_path}[search]'"
    assert maya.install_line() == f"pip install -e {tmp_path}"
    assert str(maya) == f"not installed, imported from {tmp_path}"


def test_packages_come_with_their_extra(tmp_path: Path) -> None:
    maya = installed(tmp_path, None)
    line = maya.install_line(packages=["deepspeed", "transformers", "accelerate", "peft"])
    assert line == "pip install 'maya-emulator[deepspeed,huggingface]' peft"
    assert maya.extra_of("triton") == "compile"
    assert maya.extra_of("peft") is None  # an extra for contributors does not count
