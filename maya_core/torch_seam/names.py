"""A private name of torch, with the versions that have it, and the ways to read and to replace it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from maya_core.patches import MissingName, Patches
from maya_core.torch_seam.version import FIRST, Version, installed


@dataclass(frozen=True)
class Name:
    """`owner` is a module (`torch.distributed.rendezvous`), or a class in one (`torch._inductor.scheduler:Scheduler`).

    `since` is the first supported version that has the name, and `until` the first that no longer has it. On other versions nothing is
    replaced, because there is nothing to replace. `cuda_build`: a CPU build of torch lacks it, and the emulated device adds it.
    `late`: torch itself adds it later, when it initializes a device for example.
    """

    owner: str
    name: str
    since: Version = FIRST
    until: Version | None = None
    cuda_build: bool = False
    late: bool = False

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @property
    def expected(self) -> bool:
        """Whether the installed version has it, or would have it as a CUDA build."""
        version = installed().version
        return self.since <= version and (self.until is None or version < self.until)

    @property
    def module(self) -> str:
        return self.owner.partition(":")[0]

    def target(self, module: ModuleType | None = None) -> Any:
        """The module or class that has the name."""
        found: Any = module or importlib.import_module(self.module)
        for part in filter(None, self.owner.partition(":")[2].split(".")):
            if not hasattr(found, part):
                raise MissingName(found, part)
            found = getattr(found, part)
        return found

    def get(self) -> Any:
        """What torch has under this name."""
        target = self.target()
        if not hasattr(target, self.name):
            raise MissingName(target, self.name)
        return getattr(target, self.name)

    def replace(self, patches: Patches, value: Any) -> None:
        """Replaces it until the patches are undone, as soon as the program imports the module."""
        self._when_imported(patches, lambda target: self._set(patches, target, value))

    def wrap(self, patches: Patches, wrapper: Callable[[Any], Any]) -> None:
        """Replaces a function or method by `wrapper(function)`. A class method or static method remains one."""
        self._when_imported(patches, lambda target: patches.wrap(target, self.name, wrapper))

    def _when_imported(self, patches: Patches, action: Callable[[Any], None]) -> None:
        if self.expected:
            patches.when_imported(self.module, lambda module: action(self.target(module)))

    def _set(self, patches: Patches, target: Any, value: Any) -> None:
        if self.late or (self.cuda_build and installed().cuda is None):
            patches.add(target, self.name, value)
        else:
            patches.set(target, self.name, value)


def replace_all(patches: Patches, values: Mapping[Name, Any]) -> None:
    for name, value in values.items():
        name.replace(patches, value)


def names_of(*modules: ModuleType) -> dict[str, Name]:
    """Every `Name` in these modules of the seam, by where it is written."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{constant}": value
        for module in modules
        for constant, value in vars(module).items()
        if isinstance(value, Name)
    }


# The CUDA functions of torch._C: a CPU build has none of them.
cuda = functools.partial(Name, "torch._C", cuda_build=True)
