"""The patches that an integration makes in its framework, whose versions differ.

A name that the installed version does not have costs only the patch that needs it: the user gets one line, the prediction a note, and the
program runs on. A patch without which Maya might change something of the user's is made with `require`, and stops the program instead.
The versions that an integration was checked on are the ranges in the requirements of its distribution, which pip reads too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from maya_core.errors import MayaError
from maya_core.messages import Notes
from maya_core.patches import Action, MissingName, Patches, version_in_use

Ranges = dict[str, SpecifierSet]  # of versions, by project


def checked_versions(requirements: Iterable[str] | None) -> Ranges:
    """The ranges of versions in the requirements of a distribution, as its metadata states them."""
    found: Ranges = {}
    for each in map(Requirement, requirements or ()):
        name = canonicalize_name(each.name)
        found[name] = found.get(name, SpecifierSet()) & each.specifier
    return found


class FrameworkPatches(Patches):
    """The patches of an emulation, as an integration sees them. They are undone with the others, in one order."""

    def __init__(self, patches: Patches, checked: Ranges, notes: Notes) -> None:
        super().__init__()
        self._patches = patches
        self._undo = patches._undo
        self._checked = checked
        self._notes = notes

    def set(self, target: Any, name: str, value: Any) -> None:
        try:
            super().set(target, name, value)
        except MissingName as missing:
            self._report(missing)

    def wrap(self, target: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        try:
            super().wrap(target, name, wrapper)
        except MissingName as missing:
            self._report(missing)

    def require(self, target: Any, name: str, value: Any) -> None:
        """Replaces an attribute that must exist: without the patch, the program might write or send something of the user's."""
        try:
            super().set(target, name, value)
        except MissingName as missing:
            raise MayaError(missing.problem, missing.advice) from missing

    def when_imported(self, name: str, action: Action) -> None:
        def guarded(module: ModuleType) -> None:
            try:
                action(module)
            except MissingName as missing:
                self._report(missing)
            except AttributeError as error:
                self._report(MissingName(error.obj or module, error.name or str(error)))
            except ImportError as error:
                self._report(MissingName(module, str(error)))

        self._patches.when_imported(name, guarded)

    def supports(self, project: str, module: str | None = None) -> None:
        """Tells the user if the program imports a version of a project that the integration was not checked on."""
        self._patches.when_imported(module or project.replace("-", "_"), lambda _: self._check_version(project))

    def _check_version(self, project: str) -> None:
        found, checked = version_in_use(project), self._checked.get(canonicalize_name(project))
        try:
            inside = checked is None or checked.contains(Version(found), prereleases=True)
        except InvalidVersion:  # a checkout without metadata
            return
        if not inside:
            self._notes.add(
                f"{project} {found} is installed, and Maya was checked on {project} {shown(checked)}: it may miss what changed in {project}."
            )

    def _report(self, missing: MissingName) -> None:
        self._notes.add(
            f"{missing.problem.removesuffix('.')}: this part of the emulation is missing, so the prediction may be wrong. "
            "Update Maya, or install a version that it was checked on (`maya help versions`)."
        )


def shown(versions: SpecifierSet | None) -> str:
    """`>=2.4,<2.7`, the lowest first."""
    return ",".join(sorted({str(each) for each in versions or ()}, reverse=True))
