"""The CUDA functions of torch._C, answered by the native device. torch.cuda's own Python code runs unchanged on top of them.

This module covers devices, properties, versions and library handles, and installs the other parts of the shim: memory, streams,
graphs, tensor types, copies between GPUs, NVML and timers.
"""

from __future__ import annotations

import enum
import itertools
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from maya_core.device.shim import comm, graphs, memory, nvml, streams, tensors, timers
from maya_core.device.shim.memory import allocator_conf as allocator_conf
from maya_core.hardware.catalog import Gpu
from maya_core.patches import Patches

NCCL_VERSION = (2 << 32) | (29 << 16) | 7  # the version that torch 2.13's CUDA build is linked with
CUDA_VERSION = "13.0"
CUDNN_VERSION = 92000
MOST_GPUS = 64  # kMaxDevices of native/device.h
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"

# The functions of torch.cuda through which a program reads a GPU's properties.
READERS = {
    "get_device_properties",
    "get_device_capability",
    "get_device_name",
    "is_bf16_supported",
    "is_tf32_supported",
}


def noted_properties(properties: list[DeviceProperties], asked: dict[str, None]) -> Callable[[int], DeviceProperties]:
    """A function that returns a device's properties and notes in `asked` which line of the program read them: a program that looks at its
    GPU may behave differently on another. Reads by torch itself are not noted."""

    def of_device(device: int) -> DeviceProperties:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name in READERS:
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__)):
            asked.setdefault(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return properties[device]

    return of_device


class DeviceProperties(SimpleNamespace):
    """The emulated GPU in the form of torch._C._CudaDeviceProperties."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, total_memory={self.total_memory // 2**20}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


def device_properties(gpu: Gpu, index: int) -> DeviceProperties:
    return DeviceProperties(
        name=gpu.driver_name,
        major=gpu.compute_capability[0],
        minor=gpu.compute_capability[1],
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sms,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=gpu.max_threads_per_sm,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared_memory_per_block_bytes,
        shared_memory_per_multiprocessor=gpu.shared_memory_per_block_bytes + 1024,
        clock_rate=int(gpu.boost_clock_mhz * 1000),
        memory_clock_rate=int(gpu.memory_clock_mhz * 1000),
        memory_bus_width=gpu.memory_bus_bits,
        gcnArchName="",
        uuid=uuid.UUID(int=(0x4D415941 << 96) | index + 1),
        pci_bus_id=0x19 + index,
        pci_device_id=0,
        pci_domain_id=0,
    )


class CudaError(enum.IntEnum):
    success = 0
    error = 1


def cudart(native: ModuleType) -> ModuleType:
    """The few functions of the CUDA runtime that programs call through torch.cuda.cudart()."""
    module = ModuleType("torch._C._cudart")
    success = CudaError.success

    def nothing(*_: Any) -> CudaError:
        return success

    module.__dict__.update(
        cudaError=CudaError,
        cudaGetErrorString=lambda code: "no error" if int(code) == 0 else "unknown error",
        cudaProfilerStart=nothing,
        cudaProfilerStop=nothing,
        cudaHostRegister=nothing,
        cudaHostUnregister=nothing,
        cudaStreamCreate=nothing,
        cudaStreamDestroy=nothing,
        cudaMemGetInfo=lambda device: native.memory_info(device),
    )
    return module


def generators(native: ModuleType) -> tuple[torch.Generator, ...]:
    return tuple(native.default_generator(device) for device in range(native.device_count()))


def see_more_gpus(native: ModuleType) -> None:
    """Updates what torch caches about the number of GPUs after the native device has grown. Checked with torch 2.13."""
    torch.cuda._cached_device_count = None
    if torch.cuda._initialized:
        torch.cuda.default_generators = generators(native)  # type: ignore[assignment]
        native.start_engine_threads()


def install(native: ModuleType, gpu: Gpu, patches: Patches, private: Path | None, asked: dict[str, None]) -> None:
    """Makes this process see the GPUs of the native device, which are all `gpu`."""
    _install_runtime(native, patches)
    _install_functions(native, gpu, patches)
    _install_properties(gpu, patches, asked)
    memory.install(native, patches)
    streams.install(native, patches)
    timers.install(native, patches)
    graphs.install(native, patches)
    tensors.install(native, patches)
    comm.install(patches)
    nvml.install(native, gpu, patches, private)
    patches.on_undo(_forget_fake_results)


def _install_runtime(native: ModuleType, patches: Patches) -> None:
    """Initialization, the current device and the state that torch.cuda keeps of both."""
    c, cuda = torch._C, torch.cuda
    forked = {"in_child_of_user": False}

    def init() -> None:
        # The autograd engine starts its device threads once, on the first backward, which may have run before the device existed.
        with torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]
        native.start_engine_threads()
        patches.set(cuda, "default_generators", generators(native))
        os.register_at_fork(after_in_child=lambda: forked.update(in_child_of_user=True))

    def in_bad_fork() -> bool:
        return forked["in_child_of_user"]

    def set_device(device: int) -> None:
        # As torch's own does: until CUDA is initialized, FakeTensor assumes that device 0 is the current one.
        cuda._lazy_init()  # type: ignore[no-untyped-call]
        native.set_device(device)

    def maybe_exchange_device(device: int) -> int:
        """Does what `exchange_device` does, but is a function of its own: torch._dynamo has a handler for each."""
        return int(native.exchange_device(device))

    _set_all(
        patches,
        c,
        {
            "_cuda_init": init,
            "_cuda_isInBadFork": in_bad_fork,
            "_cuda_getDeviceCount": native.device_count,
            "_cuda_getDevice": native.get_device,
            "_cuda_setDevice": set_device,
            "_cuda_exchangeDevice": native.exchange_device,
            "_cuda_maybeExchangeDevice": maybe_exchange_device,
            "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
            "_cuda_hasPrimaryContext": lambda device: True,
            "_cuda_synchronize": native.synchronize,
            "_cuda_sleep": lambda cycles: None,
            "_cuda_ipc_collect": lambda: None,
        },
    )
    runtime = cudart(native)
    patches.set(c, "_cudart", runtime)
    _set_all(
        patches,
        cuda,
        {
            "_cudart": runtime,
            "_exchange_device": native.exchange_device,
            "_maybe_exchange_device": maybe_exchange_device,
            "_is_in_bad_fork": in_bad_fork,
            "_initialized": False,
            "_cached_device_count": None,
            "_device_count_nvml": native.device_count,
        },
    )


def _install_functions(native: ModuleType, gpu: Gpu, patches: Patches) -> None:
    """Streams, library handles, debug modes and versions: functions that need no state beyond a number or two."""
    sync_debug = {"mode": 0}
    handles = itertools.count(0x5000, 0x1000)
    blas_handles: dict[int, int] = {}
    own = "sm_{}{}".format(*gpu.compute_capability)  # torch is assumed to be built for the emulated GPU
    architectures = ARCHITECTURES if own in ARCHITECTURES.split() else f"{own} {ARCHITECTURES}"
    _set_all(
        patches,
        torch._C,
        {
            "_cuda_getCurrentStream": native.current_stream,
            "_cuda_getCurrentRawStream": native.current_raw_stream,
            "_cuda_getDefaultStream": native.default_stream,
            "_cuda_getStreamFromExternal": lambda pointer, device: (
                native.stream_of_handle(pointer),
                device,
                streams.CUDA,
            ),
            "_cuda_setStream": lambda stream_id, device_index, device_type=streams.CUDA: native.set_stream(
                stream_id, device_index
            ),
            "_cuda_getArchFlags": lambda: architectures,
            "_cuda_getCompiledVersion": lambda: 13000,
            "_cuda_getCurrentBlasHandle": lambda: blas_handles.setdefault(native.get_device(), next(handles)),
            "_cuda_getCurrentSolverHandle": lambda: blas_handles.setdefault(-1 - native.get_device(), next(handles)),
            "_cuda_clearCublasWorkspaces": native.clear_blas_workspaces,
            "_cuda_set_sync_debug_mode": lambda mode: sync_debug.update(mode=mode),
            "_cuda_get_sync_debug_mode": lambda: sync_debug["mode"],
            "_cuda_get_cudnn_benchmark_limit": lambda: 10,
            "_cuda_get_conv_benchmark_empty_cache": lambda: True,
            "_cudnn_set_conv_benchmark_empty_cache": lambda enabled: None,
            "_cuda_set_cudnn_benchmark_limit": lambda limit: None,
            "_nccl_version": lambda: NCCL_VERSION,
            "_nccl_version_suffix": lambda: b"",
            "_has_cuda": True,
            "_has_cudnn": True,
        },
    )
    patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.cuda, "has_magma", True)
    patches.set(torch, "has_cuda", True)


def _install_properties(gpu: Gpu, patches: Patches, asked: dict[str, None]) -> None:
    properties = [device_properties(gpu, index) for index in range(MOST_GPUS)]
    of_device = noted_properties(properties, asked)
    patches.set(torch._C, "_CudaDeviceProperties", DeviceProperties)
    patches.set(torch.cuda, "_CudaDeviceProperties", DeviceProperties)
    patches.set(torch.cuda, "_get_device_properties", of_device)
    patches.set(torch._C, "_cuda_getDeviceProperties", of_device)


def _set_all(patches: Patches, target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        patches.set(target, name, value)


def _forget_fake_results() -> None:
    """Clears FakeTensor's cache, whose results name the device that was current when they were computed."""
    if fake := sys.modules.get("torch._subclasses.fake_tensor"):
        fake.FakeTensorMode.cache_clear()
