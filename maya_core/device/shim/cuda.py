"""The CUDA functions of torch._C, answered by the native device. torch.cuda's own Python code runs unchanged on top of them.

This module covers devices, properties, versions and library handles, and installs the other parts of the shim: memory, streams,
graphs, tensor types, copies between GPUs, NVML and timers.
"""

from __future__ import annotations

import enum
import itertools
import os
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from maya_core.device.shim import comm, graphs, ipc, memory, nvml, streams, tensors, timers
from maya_core.device.shim.memory import allocator_conf as allocator_conf
from maya_core.hardware.catalog import Gpu
from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam
from maya_core.torch_seam.names import replace_all

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
    module = ModuleType(str(seam.CUDART))
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
    """Updates what torch caches about the number of GPUs after the native device has grown."""
    seam.forget_device_count()
    if seam.is_initialized():
        torch.cuda.default_generators = generators(native)  # type: ignore[assignment]
        native.start_engine_threads()


def install(
    native: ModuleType,
    gpu: Gpu,
    patches: Patches,
    private: Path | None,
    asked: dict[str, None],
    count: Callable[[], int],
) -> None:
    """Makes this process see the GPUs of the native device, which are all `gpu`, or so many of them as `count` says."""
    _install_runtime(native, patches, count)
    _install_functions(native, gpu, patches)
    _install_properties(gpu, patches, asked)
    memory.install(native, patches)
    streams.install(native, patches)
    timers.install(native, patches)
    graphs.install(native, patches)
    tensors.install(native, patches)
    comm.install(patches)
    ipc.install(native, patches)
    nvml.install(native, gpu, patches, private)
    patches.on_undo(seam.forget_fake_results)


def _first_backward() -> None:
    torch.ones((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _install_runtime(native: ModuleType, patches: Patches, count: Callable[[], int]) -> None:
    """Initialization, the current device and the state that torch.cuda keeps of both."""
    forked = {"in_child_of_user": False}

    def init() -> None:
        # The autograd engine starts its device threads once, on the first backward, which may have run before the device existed.
        # In a thread of its own, no mode of the program sees this backward.
        first = threading.Thread(target=_first_backward)
        first.start()
        first.join()
        native.start_engine_threads()
        seam.DEFAULT_GENERATORS.replace(patches, generators(native))
        os.register_at_fork(after_in_child=after_fork)

    def after_fork() -> None:
        forked.update(in_child_of_user=True)
        if native.installed():
            native.require_initialization()

    def in_bad_fork() -> bool:
        return forked["in_child_of_user"]

    def set_device(device: int) -> None:
        # As torch's own does: until CUDA is initialized, FakeTensor assumes that device 0 is the current one.
        seam.lazy_init()
        native.set_device(device)

    def maybe_exchange_device(device: int) -> int:
        """Does what `exchange_device` does, but is a function of its own: torch._dynamo has a handler for each."""
        return int(native.exchange_device(device))

    runtime = cudart(native)
    replace_all(
        patches,
        {
            seam.INIT: init,
            seam.IS_IN_BAD_FORK: in_bad_fork,
            seam.GET_DEVICE_COUNT: count,
            seam.GET_DEVICE: native.get_device,
            seam.SET_DEVICE: set_device,
            seam.EXCHANGE_DEVICE: native.exchange_device,
            seam.MAYBE_EXCHANGE_DEVICE: maybe_exchange_device,
            seam.CAN_DEVICE_ACCESS_PEER: lambda device, peer: device != peer,
            seam.HAS_PRIMARY_CONTEXT: lambda device: True,
            seam.SYNCHRONIZE: native.synchronize,
            seam.SLEEP: lambda cycles: None,
            seam.IPC_COLLECT: lambda: None,
            seam.CUDART: runtime,
            seam.PYTHON_CUDART: runtime,
            seam.PYTHON_EXCHANGE_DEVICE: native.exchange_device,
            seam.PYTHON_MAYBE_EXCHANGE_DEVICE: maybe_exchange_device,
            seam.PYTHON_IS_IN_BAD_FORK: in_bad_fork,
            seam.INITIALIZED: False,
            seam.CACHED_DEVICE_COUNT: None,
            seam.DEVICE_COUNT_NVML: count,
        },
    )


def _install_functions(native: ModuleType, gpu: Gpu, patches: Patches) -> None:
    """Streams, library handles, debug modes and versions: functions that need no state beyond a number or two."""
    sync_debug = {"mode": 0}
    handles = itertools.count(0x5000, 0x1000)
    blas_handles: dict[int, int] = {}
    libraries = seam.libraries()
    own = "sm_{}{}".format(*gpu.compute_capability)  # torch is assumed to be built for the emulated GPU
    architectures = ARCHITECTURES if own in ARCHITECTURES.split() else f"{own} {ARCHITECTURES}"
    replace_all(
        patches,
        {
            seam.GET_CURRENT_STREAM: native.current_stream,
            seam.GET_CURRENT_RAW_STREAM: native.current_raw_stream,
            seam.GET_DEFAULT_STREAM: native.default_stream,
            seam.GET_STREAM_FROM_EXTERNAL: lambda pointer, device: (
                native.stream_of_handle(pointer),
                device,
                streams.CUDA,
            ),
            seam.SET_STREAM: lambda stream_id, device_index, device_type=streams.CUDA: native.set_stream(
                stream_id, device_index
            ),
            seam.GET_ARCH_FLAGS: lambda: architectures,
            seam.GET_COMPILED_VERSION: lambda: libraries.cuda_number,
            seam.GET_CURRENT_BLAS_HANDLE: lambda: blas_handles.setdefault(native.get_device(), next(handles)),
            seam.GET_CURRENT_SOLVER_HANDLE: lambda: blas_handles.setdefault(-1 - native.get_device(), next(handles)),
            seam.CLEAR_CUBLAS_WORKSPACES: native.clear_blas_workspaces,
            seam.SET_SYNC_DEBUG_MODE: lambda mode: sync_debug.update(mode=mode),
            seam.GET_SYNC_DEBUG_MODE: lambda: sync_debug["mode"],
            seam.GET_CUDNN_BENCHMARK_LIMIT: lambda: 10,
            seam.SET_CUDNN_BENCHMARK_LIMIT: lambda limit: None,
            seam.GET_CONV_BENCHMARK_EMPTY_CACHE: lambda: True,
            seam.SET_CONV_BENCHMARK_EMPTY_CACHE: lambda enabled: None,
            seam.NCCL_VERSION: lambda: libraries.nccl_number,
            seam.NCCL_VERSION_SUFFIX: lambda: b"",
            seam.HAS_CUDA: True,
            seam.HAS_CUDNN: True,
        },
    )
    patches.set(torch.version, "cuda", libraries.cuda)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(torch.cuda, "has_magma", True)
    patches.add(torch, "has_cuda", True)  # deprecated: torch computes it when it is read, with a warning


def _install_properties(gpu: Gpu, patches: Patches, asked: dict[str, None]) -> None:
    properties = [device_properties(gpu, index) for index in range(MOST_GPUS)]
    of_device = noted_properties(properties, asked)
    seam.DEVICE_PROPERTIES.replace(patches, DeviceProperties)
    seam.PYTHON_DEVICE_PROPERTIES.replace(patches, DeviceProperties)
    seam.PYTHON_GET_DEVICE_PROPERTIES.replace(patches, of_device)
    seam.GET_DEVICE_PROPERTIES.replace(patches, of_device)
