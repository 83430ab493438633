"""Looks at the optional packages: frameworks, torch.compile's Triton, samplers, trackers. Which they are is read from the metadata of Maya's extras."""

from __future__ import annotations

from packaging.requirements import Requirement

from maya_core.doctor.findings import Finding, State
from maya_core.errors import MayaError
from maya_core.framework_patches import shown
from maya_core.installation import how_to_install, installation, version_of
from maya_core.torch_seam import version as torch_versions

# What each extra is for.
PURPOSES = {
    "lightning": "programs with Lightning or Fabric",
    "pytorch-lightning": "programs with Lightning under its older name",
    "huggingface": "programs with transformers or accelerate",
    "deepspeed": "programs with DeepSpeed",
    "megatron": "programs with Megatron Core",
    "compile": "torch.compile",
    "search": "`maya search`",
    "ray": "`--executor ray`",
    "mlflow": "`--mlflow`, `maya compare`",
}


def optional_packages() -> list[Finding]:
    own = installation()
    order = [*(extra for extra in PURPOSES if extra in own.extras), *(own.extras.keys() - PURPOSES.keys())]
    return [_package(need, extra) for extra in order for need in own.extras[extra]]


def _package(need: Requirement, extra: str) -> Finding:
    version = version_of(need.name)
    if version is None:
        purpose = PURPOSES.get(extra, f"the extra '{extra}'")
        return Finding(
            need.name, f"not installed; for {purpose}", State.ABSENT, f"for {purpose}: {_install(need, extra)}"
        )
    if need.name == "triton" and (finding := _other_triton(version)) is not None:
        return finding
    if not need.specifier.contains(version, prereleases=True):
        checked = shown(need.specifier)
        return Finding(need.name, f"{version}; Maya was checked on {checked}", State.WARNING, _install(need, extra))
    return Finding(need.name, version)


def _install(need: Requirement, extra: str) -> str:
    triton = _triton_of_torch() if need.name == "triton" else None
    return f"pip install triton=={triton}" if triton is not None else how_to_install(extra)


def _triton_of_torch() -> str | None:
    """The Triton with which the installed torch is released."""
    try:
        return torch_versions.TRITON.get(torch_versions.installed().version)
    except (MayaError, OSError, KeyError, SyntaxError, ValueError):
        return None


def _other_triton(version: str) -> Finding | None:
    released = _triton_of_torch()
    if released is None:
        return None
    torch = torch_versions.text(torch_versions.installed().version)
    if version.split("+")[0] == released:
        return Finding("triton", f"{version}, with which torch {torch} is released")
    return Finding(
        "triton",
        f"{version}, but torch {torch} is released with {released}: torch.compile may generate other kernels, or fail",
        State.WARNING,
        f"pip install triton=={released}",
    )
