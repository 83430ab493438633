"""A pynvml module for a node with the emulated GPUs, whether or not nvidia-ml-py is installed.

Memory figures are those of the emulated allocators. Sensor readings mean nothing without a GPU, so they are the constants of a
busy GPU in `AT_WORK`. Functions that are missing here raise NVMLError_NotSupported, as on a GPU that lacks the feature.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from maya_core.device.shim import smi
from maya_core.hardware.catalog import Gpu, default_node
from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam

DRIVER_VERSION = "580.95.05"
CUDA_DRIVER_VERSION = 13000
NVML_VERSION = "13.580.95.05"
AT_WORK = SimpleNamespace(utilization_percent=100, memory_utilization_percent=50, temperature_c=50)

# nvml.h, CUDA 13
ERRORS = {
    1: "Uninitialized", 2: "InvalidArgument", 3: "NotSupported", 4: "NoPermission", 5: "AlreadyInitialized", 6: "NotFound", 7: "InsufficientSize",
    8: "InsufficientPower", 9: "DriverNotLoaded", 10: "Timeout", 11: "IrqIssue", 12: "LibraryNotFound", 13: "FunctionNotFound", 14: "CorruptedInforom",
    15: "GpuIsLost", 16: "ResetRequired", 17: "OperatingSystem", 18: "LibRmVersionMismatch", 19: "InUse", 20: "Memory", 21: "NoData",
    23: "InsufficientResources", 24: "FreqNotSupported", 999: "Unknown",
}  # fmt: skip
CONSTANTS = {
    "NVML_SUCCESS": 0, "NVML_FEATURE_DISABLED": 0, "NVML_FEATURE_ENABLED": 1, "NVML_TEMPERATURE_GPU": 0,
    "NVML_CLOCK_GRAPHICS": 0, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_CLOCK_VIDEO": 3,
    "NVML_TEMPERATURE_THRESHOLD_SHUTDOWN": 0, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": 1,
    "NVML_COMPUTEMODE_DEFAULT": 0, "NVML_NVLINK_MAX_LINKS": 36, "NVML_VALUE_NOT_AVAILABLE_ulonglong": 2**64 - 1,
    "NVML_P2P_CAPS_INDEX_READ": 0, "NVML_P2P_CAPS_INDEX_WRITE": 1, "NVML_P2P_CAPS_INDEX_NVLINK": 2, "NVML_P2P_CAPS_INDEX_ATOMICS": 3,
    "NVML_P2P_STATUS_OK": 0, "NVML_P2P_STATUS_NOT_SUPPORTED": 5,
    "NVML_TOPOLOGY_INTERNAL": 0, "NVML_TOPOLOGY_SINGLE": 10, "NVML_TOPOLOGY_MULTIPLE": 20, "NVML_TOPOLOGY_HOSTBRIDGE": 30,
    "NVML_TOPOLOGY_NODE": 40, "NVML_TOPOLOGY_CPU": 40, "NVML_TOPOLOGY_SYSTEM": 50,
    "NVML_NVLINK_CAP_P2P_SUPPORTED": 0, "NVML_NVLINK_CAP_SYSMEM_ACCESS": 1, "NVML_NVLINK_CAP_P2P_ATOMICS": 2, "NVML_NVLINK_CAP_SYSMEM_ATOMICS": 3,
    "NVML_NVLINK_CAP_SLI_BRIDGE": 4, "NVML_NVLINK_CAP_VALID": 5,
    "NVML_DEVICE_ARCH_VOLTA": 5, "NVML_DEVICE_ARCH_TURING": 6, "NVML_DEVICE_ARCH_AMPERE": 7, "NVML_DEVICE_ARCH_ADA": 8,
    "NVML_DEVICE_ARCH_HOPPER": 9, "NVML_DEVICE_ARCH_BLACKWELL": 10, "NVML_BRAND_NVIDIA": 14, "NVML_PSTATE_0": 0, "nvmlMemory_v2": 0x02000028,
}  # fmt: skip
ARCHITECTURES = {
    (7, 0): 5,
    (7, 5): 6,
    (8, 0): 7,
    (8, 6): 7,
    (8, 9): 8,
    (9, 0): 9,
    (10, 0): 10,
    (10, 3): 10,
    (12, 0): 10,
}


@dataclass(frozen=True)
class Handle:
    """The handle by which NVML refers to a GPU."""

    index: int


class NVMLError(Exception):
    value = 999

    def __init__(self, value: int | None = None) -> None:
        self.value = self.value if value is None else value
        super().__init__(self.value)

    def __str__(self) -> str:
        return ERRORS.get(self.value, "Unknown")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NVMLError) and self.value == other.value

    __hash__ = Exception.__hash__


ERROR_CLASSES = {
    name: type(f"NVMLError_{name}", (NVMLError,), {"value": value, "__module__": "pynvml"})
    for value, name in ERRORS.items()
}


class Node:
    """What NVML knows about the GPUs of this node."""

    def __init__(self, native: ModuleType, gpu: Gpu) -> None:
        self._native = native
        self.gpu = gpu

    @property
    def count(self) -> int:
        return int(self._native.device_count())

    def check(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise ERROR_CLASSES["InvalidArgument"]
        return index

    def properties(self, index: int) -> Any:
        return torch.cuda.get_device_properties(index)

    def uuid(self, index: int) -> str:
        return f"GPU-{self.properties(index).uuid}"

    def bus_id(self, index: int) -> str:
        found = self.properties(index)
        return f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"

    def memory(self, index: int) -> tuple[int, int, int]:
        """Total, used and free bytes."""
        free, total = self._native.memory_info(index)
        return total, total - free, free

    def watts(self) -> int:
        return int(self.gpu.power_limit_w)

    def nvlinks(self) -> int:
        """The number of NVLinks of each GPU. Bridges between two boards do not count, because Maya does not know whether they are installed."""
        joined = default_node(self.gpu).topology in ("nvswitch", "mesh")
        return self.gpu.nvlink_links if self.count > 1 and joined else 0


def _identity(node: Node) -> dict[str, Callable[..., Any]]:
    """Functions that count, find and identify the GPUs."""

    def text(value: str | bytes) -> str:
        return value.decode() if isinstance(value, bytes) else value

    def by(name_of: Callable[[int], str], wanted: str | bytes) -> Handle:
        for index in range(node.count):
            if name_of(index).lower() == text(wanted).lower():
                return Handle(index)
        raise ERROR_CLASSES["NotFound"]

    def pci(handle: Handle) -> SimpleNamespace:
        found = node.properties(handle.index)
        return SimpleNamespace(
            busId=node.bus_id(handle.index), busIdLegacy=node.bus_id(handle.index)[4:], domain=found.pci_domain_id, bus=found.pci_bus_id,
            device=found.pci_device_id, pciDeviceId=0, pciSubSystemId=0,
        )  # fmt: skip

    return {
        "nvmlDeviceGetCount": lambda: node.count,
        "nvmlDeviceGetHandleByIndex": lambda index: Handle(node.check(index)),
        "nvmlDeviceGetHandleByUUID": lambda uuid: by(node.uuid, uuid),
        "nvmlDeviceGetHandleByPciBusId": lambda bus: by(lambda index: node.bus_id(index)[-len(text(bus)) :], bus),
        "nvmlDeviceGetIndex": lambda handle: handle.index,
        "nvmlDeviceGetMinorNumber": lambda handle: handle.index,
        "nvmlDeviceGetName": lambda handle: node.gpu.driver_name,
        "nvmlDeviceGetBrand": lambda handle: CONSTANTS["NVML_BRAND_NVIDIA"],
        "nvmlDeviceGetUUID": lambda handle: node.uuid(handle.index),
        "nvmlDeviceGetPciInfo": pci,
        "nvmlDeviceGetArchitecture": lambda handle: ARCHITECTURES.get(node.gpu.compute_capability, 2**32 - 1),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: node.gpu.compute_capability,
        "nvmlDeviceGetMultiGpuBoard": lambda handle: 0,
        "nvmlDeviceGetComputeMode": lambda handle: 0,
        "nvmlDeviceGetPersistenceMode": lambda handle: 1,
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceIsMigDeviceHandle": lambda handle: 0,
        "nvmlDeviceGetMemoryBusWidth": lambda handle: node.gpu.memory_bus_bits,
        "nvmlSystemGetDriverVersion": lambda: DRIVER_VERSION,
        "nvmlSystemGetNVMLVersion": lambda: NVML_VERSION,
        "nvmlSystemGetCudaDriverVersion": lambda: CUDA_DRIVER_VERSION,
        "nvmlSystemGetCudaDriverVersion_v2": lambda: CUDA_DRIVER_VERSION,
    }


def _state(node: Node) -> dict[str, Callable[..., Any]]:
    """Functions that report memory, processes, utilization, power and clocks."""

    def memory(handle: Handle, version: int | None = None) -> SimpleNamespace:
        total, used, free = node.memory(handle.index)
        if not version:
            return SimpleNamespace(total=total, free=free, used=used)
        return SimpleNamespace(version=version, total=total, reserved=0, free=free, used=used)

    def processes(handle: Handle) -> list[SimpleNamespace]:
        used = node.memory(handle.index)[1]
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=used, gpuInstanceId=2**32 - 1, computeInstanceId=2**32 - 1)
        ]

    def clock(handle: Handle, kind: int) -> int:
        return int(node.gpu.memory_clock_mhz if kind == CONSTANTS["NVML_CLOCK_MEM"] else node.gpu.boost_clock_mhz)

    answers: dict[str, Callable[..., Any]] = {
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(
            gpu=AT_WORK.utilization_percent, memory=AT_WORK.memory_utilization_percent
        ),
        "nvmlDeviceGetTemperature": lambda handle, sensor: AT_WORK.temperature_c,
        "nvmlDeviceGetPerformanceState": lambda handle: 0,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
    }
    for version in ("", "_v2", "_v3"):
        answers[f"nvmlDeviceGetComputeRunningProcesses{version}"] = processes
    for name in ("PowerUsage", "EnforcedPowerLimit", "PowerManagementLimit", "PowerManagementDefaultLimit"):
        answers[f"nvmlDeviceGet{name}"] = lambda handle: node.watts() * 1000
    for name in ("ClockInfo", "MaxClockInfo", "ApplicationsClock", "DefaultApplicationsClock"):
        answers[f"nvmlDeviceGet{name}"] = clock
    return answers


def _connections(node: Node) -> dict[str, Callable[..., Any]]:
    """Functions that report how the GPUs are connected: all to all by NVLink where the GPU has it, otherwise by PCIe within the node."""

    def link(handle: Handle, number: int) -> int:
        if number >= node.nvlinks():
            raise ERROR_CLASSES["NotSupported" if not node.nvlinks() else "InvalidArgument"]
        return number

    def p2p(one: Handle, other: Handle, capability: Any) -> int:
        wanted = capability[0] if isinstance(capability, tuple) else capability
        reachable = wanted != CONSTANTS["NVML_P2P_CAPS_INDEX_NVLINK"] or node.nvlinks()
        return CONSTANTS["NVML_P2P_STATUS_OK" if reachable else "NVML_P2P_STATUS_NOT_SUPPORTED"]

    def common_ancestor(one: Handle, other: Handle) -> int:
        return CONSTANTS["NVML_TOPOLOGY_INTERNAL" if one == other else "NVML_TOPOLOGY_NODE"]

    def remote_pci(handle: Handle, number: int) -> SimpleNamespace:
        link(handle, number)  # raises for an unknown link; with NVSwitch the remote end of every link is a switch
        return SimpleNamespace(busId="00000000:05:00.0", domain=0, bus=5, device=0, pciDeviceId=0, pciSubSystemId=0)

    return {
        "nvmlDeviceGetNvLinkState": lambda handle, number: int(link(handle, number) >= 0),
        "nvmlDeviceGetNvLinkVersion": lambda handle, number: (
            node.gpu.nvlink_generation if link(handle, number) >= 0 else 0
        ),
        "nvmlDeviceGetNvLinkCapability": lambda handle, number, capability: int(
            link(handle, number) >= 0 and capability in (0, 2, 5)
        ),
        "nvmlDeviceGetNvLinkRemotePciInfo": remote_pci,
        "nvmlDeviceGetP2PStatus": p2p,
        "nvmlDeviceGetTopologyCommonAncestor": common_ancestor,
        "nvmlDeviceGetTopologyNearestGpus": lambda handle, level: [
            Handle(i) for i in range(node.count) if i != handle.index and level >= 40
        ],
        "nvmlDeviceOnSameBoard": lambda one, other: 0,
    }


def pynvml(node: Node) -> ModuleType:
    """The module that `import pynvml` gives."""
    module = ModuleType("pynvml", "NVML as emulated by Maya.")
    users = SimpleNamespace(count=0)

    def init(*_: Any) -> None:
        users.count += 1

    def shutdown() -> None:
        if users.count == 0:
            raise ERROR_CLASSES["Uninitialized"]
        users.count -= 1

    def initialized(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if users.count == 0:
                raise ERROR_CLASSES["Uninitialized"]
            return function(*args, **kwargs)

        return call

    def not_supported(name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")

        def call(*args: Any, **kwargs: Any) -> Any:
            raise ERROR_CLASSES["NotSupported"]

        return call

    def error_of(value: int) -> NVMLError:
        found: type[NVMLError] = ERROR_CLASSES.get(ERRORS.get(value, "Unknown"), NVMLError)
        return found(value)

    answers = {**_identity(node), **_state(node), **_connections(node)}
    module.__dict__.update({name: initialized(function) for name, function in answers.items()})
    module.__dict__.update(CONSTANTS)
    module.__dict__.update({f"NVML_ERROR_{_upper(name)}": value for value, name in ERRORS.items()})
    module.__dict__.update({f"NVMLError_{name}": cls for name, cls in ERROR_CLASSES.items()})
    module.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlInitWithFlags=init,
        nvmlShutdown=shutdown,
        nvmlErrorString=lambda value: ERRORS.get(value, "Success" if value == 0 else "Unknown"),
        nvmlExceptionClass=lambda value: type(error_of(value)),
        __version__=NVML_VERSION,
        __getattr__=not_supported,
    )
    return module


def _upper(name: str) -> str:
    """Turns 'InvalidArgument' into the spelling of nvml.h, 'INVALID_ARGUMENT'."""
    return "".join("_" + letter if letter.isupper() and i else letter for i, letter in enumerate(name)).upper()


def install(native: ModuleType, gpu: Gpu, patches: Patches, private: Path | None) -> None:
    """Installs the module `pynvml`, torch.cuda's use of it, and `nvidia-smi` for child processes."""
    node = Node(native, gpu)
    module = pynvml(node)
    patches.put(sys.modules, "pynvml", module)
    seam.PYNVML.replace(patches, module)
    seam.HAS_PYNVML.replace(patches, True)
    # The emulated NVML counts the GPUs of this process only, so CUDA_VISIBLE_DEVICES must not be applied a second time.
    for name in (seam.NVML_DEVICE_INDEX, seam.MEMORY_NVML_DEVICE_INDEX):
        name.replace(patches, lambda device: seam.device_index(device, optional=True))
    smi.install(node, patches, private)
