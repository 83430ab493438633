"""How Maya is installed, and the command that installs what is missing.

Installers record where a package came from (direct_url.json, PEP 610), and the package's metadata lists what its extras need. All advice of the
form `pip install ...` that concerns Maya's own extras is made here, so that it is right for this very installation.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

from maya_core.version import PACKAGE

DISTRIBUTION = "maya-emulator"
FOR_CONTRIBUTORS = ("dev", "docs", "fit")  # extras that running Maya never needs


class Installation:
    """An installed Maya, or one that is only imported from its folder (then there is no distribution)."""

    def __init__(self, found: Distribution | None, package: Path = PACKAGE) -> None:
        self._package = package
        self._metadata = found
        text = found.read_text("direct_url.json") if found is not None else None
        self._origin: dict[str, Any] = json.loads(text) if text else {}

    @property
    def registered(self) -> bool:
        """Whether an installer put it into this environment, with its entry points."""
        return self._metadata is not None

    @property
    def editable(self) -> bool:
        return bool(self._origin.get("dir_info", {}).get("editable"))

    @property
    def local_path(self) -> Path | None:
        """The folder or the file on this machine that it was installed from."""
        url = urlsplit(self._origin.get("url", ""))
        return Path(unquote(url.path)) if url.scheme == "file" and "vcs_info" not in self._origin else None

    @property
    def elsewhere(self) -> Path | None:
        """The folder that was installed, if Python imports another one, because of PYTHONPATH for instance."""
        if self._metadata is None:
            return None
        expected = self.local_path if self.editable else Path(str(self._metadata.locate_file("")))
        return expected if expected is not None and expected.resolve() != self._package.parent.resolve() else None

    def __str__(self) -> str:
        """How it is installed, in words."""
        local = self.local_path
        if not self.registered:
            return f"not installed, imported from {self._package.parent}"
        if local is not None:
            kind = "wheel" if local.suffix == ".whl" else "folder"
            how = "editable, from the folder" if self.editable else f"from the {kind}"
            return f"{how} {local}{'' if local.exists() else ', which is gone'}"
        return f"from {self._remote()}" if self._origin else "from a package index"

    # ---- what its extras need ----

    @functools.cached_property
    def extras(self) -> dict[str, list[Requirement]]:
        """What each extra for users needs."""
        if self._metadata is None:
            return {}
        needs = [Requirement(line) for line in self._metadata.requires or ()]
        extras = [
            each for each in self._metadata.metadata.get_all("Provides-Extra") or () if each not in FOR_CONTRIBUTORS
        ]
        return {
            extra: [need for need in needs if need.marker is not None and need.marker.evaluate({"extra": extra})]
            for extra in extras
        }

    def extra_of(self, package: str) -> str | None:
        """The extra that brings this package."""
        return next((each for each, needs in self.extras.items() if package in {need.name for need in needs}), None)

    # ---- advice ----

    def install_line(self, extras: Iterable[str] = (), packages: Iterable[str] = ()) -> str:
        """The command that adds these extras, and these packages: those that an extra brings come with the extra. Without either, it is
        the one that installs Maya."""
        wanted, others = list(extras), []
        for package in packages:
            extra = self.extra_of(package)
            if extra is None:
                others.append(package)
            elif extra not in wanted:
                wanted.append(extra)
        own: list[str] | None = []
        if wanted or not others:
            own = self._itself(f"[{','.join(wanted)}]" if wanted else "")
        if own is None:
            own = [f"{need.name}{need.specifier}" for extra in wanted for need in self.extras.get(extra, ())]
        return f"pip install {shlex.join([*own, *others])}"

    def _itself(self, extras: str) -> list[str] | None:
        """What pip is given to install this Maya again with extras; None if what it came from is gone."""
        local = self.local_path
        if not self.registered:
            local = self._package.parent
            return ["-e", f"{local}{extras}"] if (local / "pyproject.toml").exists() else [f"{DISTRIBUTION}{extras}"]
        if local is not None:
            return [*(["-e"] if self.editable else []), f"{local}{extras}"] if local.exists() else None
        return [f"{DISTRIBUTION}{extras} @ {self._remote()}"] if self._origin else [f"{DISTRIBUTION}{extras}"]

    def _remote(self, newest: bool = False) -> str:
        """The address of a repository or of an archive that it was installed from."""
        address = str(self._origin["url"])
        if vcs := self._origin.get("vcs_info"):
            revision = vcs.get("requested_revision") or ("" if newest else vcs["commit_id"])
            address = f"{vcs['vcs']}+{address}{'@' if revision else ''}{revision}"
        folder = self._origin.get("subdirectory")
        return f"{address}#subdirectory={folder}" if folder else address

    def upgrade_advice(self) -> str:
        """How to get a newer Maya, as a sentence."""
        local = self.local_path if self.registered else self._package.parent
        if local is not None and local.suffix == ".whl":
            return "Install a newer wheel of Maya."
        if local is not None:
            again = "." if self.editable or not self.registered else f", and install it again: pip install {local}"
            return f"Update the sources in {local}{again}"
        if "vcs_info" in self._origin:
            return f"Upgrade with: pip install -U '{DISTRIBUTION} @ {self._remote(newest=True)}'"
        if self._origin:
            return "Install a newer archive of Maya."
        return f"Upgrade with: pip install -U {DISTRIBUTION}"


@functools.cache
def installation() -> Installation:
    """The Maya of this process."""
    try:
        return Installation(distribution(DISTRIBUTION))
    except PackageNotFoundError:
        return Installation(None)


def how_to_install(*extras: str, packages: Sequence[str] = ()) -> str:
    """The command that adds extras of Maya, and packages, to this environment."""
    return installation().install_line(extras, packages)


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if version_of(package) is None]
