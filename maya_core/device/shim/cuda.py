"""torch._C's CUDA functions and what torch.cuda keeps of them. torch.cuda's own Python runs unchanged on top."""

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

from maya_core.device.shim import comm, graphs, nvml, streams, tensors, timers
from maya_core.hardware.catalog import Gpu
from maya_core.patches import Patches

NCCL_VERSION = (2 << 32) | (29 << 16) | 7  # what torch 2.13's CUDA build is linked with
CUDA_VERSION = "13.0"
CUDNN_VERSION = 92000
MOST_GPUS = 64  # kMaxDevices of native/device.h
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


# Functions of torch.cuda by which a program asks for a GPU's properties; torch asks for itself, too, when it starts.
ASKING = {"get_device_properties", "get_device_capability", "get_device_name", "is_bf16_supported", "is_tf32_supported"}


def askable(properties: list[DeviceProperties], asked: dict[str, None]) -> Callable[[int], DeviceProperties]:
    """A device's properties, and a note of the line that asked for them: a program that looks at its GPU may do other things on another."""

    def of_device(device: int) -> DeviceProperties:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name in ASKING:
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__)):
            asked.setdefault(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return properties[device]

    return of_device


class DeviceProperties(SimpleNamespace):
    """What torch._C._CudaDeviceProperties says of the emulated GPU."""

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
    """The few runtime functions that programs call through torch.cuda.cudart()."""
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
    """The native device has grown: what torch keeps of the number of GPUs is made anew. Checked with torch 2.13."""
    torch.cuda._cached_device_count = None
    if torch.cuda._initialized:
        torch.cuda.default_generators = generators(native)  # type: ignore[assignment]
        native.start_engine_threads()


def install(native: ModuleType, gpu: Gpu, patches: Patches, private: Path | None, asked: dict[str, None]) -> None:
    """Makes this process see the native device's GPUs, which are of the given kind."""
    c, cuda = torch._C, torch.cuda
    forked = {"in_child_of_user": False}
    raw_allocations: dict[int, int] = {}
    history = {"enabled": False}
    sync_debug = {"mode": 0}
    handles = itertools.count(0x5000, 0x1000)
    blas_handles: dict[int, int] = {}
    own = "sm_{}{}".format(*gpu.compute_capability)  # the GPU asked for is taken to be one torch was built for
    architectures = ARCHITECTURES if own in ARCHITECTURES.split() else f"{own} {ARCHITECTURES}"

    def init() -> None:
        # The engine makes its device threads once, on the first backward; that may have been before we came.
        with torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()
        native.start_engine_threads()
        patches.set(cuda, "default_generators", generators(native))
        os.register_at_fork(after_in_child=lambda: forked.update(in_child_of_user=True))

    def set_device(device: int) -> None:
        cuda._lazy_init()  # as torch's own does; FakeTensor takes device 0 for the current one until then
        native.set_device(device)

    def maybe_exchange_device(device: int) -> int:
        """Another function than the one it is like: torch._dynamo has a handler for each."""
        return int(native.exchange_device(device))

    def record_history(
        enabled: str | None, context: str | None = "all", stacks: str = "all", max_entries: int = sys.maxsize, *_: Any
    ) -> None:
        history["enabled"] = enabled is not None
        native.record_memory_history(
            enabled is not None, context is not None, min(max_entries, 2**62), context in ("all", "state")
        )

    def record_history_legacy(enabled: bool, record_context: bool = True, max_entries: int = 1, *_: Any) -> None:
        record_history("all" if enabled else None, "all" if record_context else None, "all", max_entries)

    def snapshot(pool: Any = None) -> dict[str, Any]:
        which = (pool[0], pool[1]) if pool else (0, 0)
        traces = pool[2] if pool and len(pool) > 2 else True
        taken = native.memory_snapshot(which, traces)
        taken["allocator_settings"] = {
            "PYTORCH_CUDA_ALLOC_CONF": allocator_conf(),
            "expandable_segments": "expandable_segments:true" in allocator_conf().lower(),
        }
        return taken

    def raw_alloc(size: int, stream: int) -> int:
        pointer, token = native.raw_alloc(size, stream)
        raw_allocations[pointer] = token
        return pointer

    def raw_delete(pointer: int) -> None:
        if (token := raw_allocations.pop(pointer, None)) is not None:  # else a graph's own: torch_compile/graphs.py
            native.raw_delete(token)

    functions = {
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: forked["in_child_of_user"],
        "_cuda_getDeviceCount": native.device_count,
        "_cuda_getDevice": native.get_device,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": native.exchange_device,
        "_cuda_maybeExchangeDevice": maybe_exchange_device,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_getCurrentStream": native.current_stream,
        "_cuda_getCurrentRawStream": native.current_raw_stream,
        "_cuda_getDefaultStream": native.default_stream,
        "_cuda_getStreamFromExternal": lambda pointer, device: (native.stream_of_handle(pointer), device, streams.CUDA),
        "_cuda_setStream": lambda stream_id, device_index, device_type=streams.CUDA: native.set_stream(
            stream_id, device_index
        ),
        "_cuda_synchronize": native.synchronize,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_ipc_collect": lambda: None,
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
        "_cuda_memoryStats": native.memory_stats,
        "_cuda_resetPeakMemoryStats": native.reset_peak_memory_stats,
        "_cuda_resetAccumulatedMemoryStats": native.reset_accumulated_memory_stats,
        "_cuda_hostMemoryStats": dict,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_emptyCache": lambda pool=(0, 0): native.empty_cache(pool),
        "_host_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": native.set_memory_fraction,
        "_cuda_getMemoryFraction": native.memory_fraction,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": record_history_legacy,
        "_cuda_isHistoryEnabled": lambda: history["enabled"],
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": raw_delete,
        "_cuda_cudaCachingAllocator_enable": lambda enabled: None,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_nccl_version": lambda: NCCL_VERSION,
        "_nccl_version_suffix": lambda: b"",
        "_has_cuda": True,
        "_has_cudnn": True,
    }
    for name, function in functions.items():
        patches.set(c, name, function)
    runtime = cudart(native)
    patches.set(c, "_cudart", runtime)
    patches.set(cuda, "_cudart", runtime)
    patches.set(cuda, "_exchange_device", native.exchange_device)
    patches.set(cuda, "_maybe_exchange_device", maybe_exchange_device)
    patches.set(cuda, "_is_in_bad_fork", functions["_cuda_isInBadFork"])
    patches.set(cuda, "_initialized", False)
    patches.set(cuda, "_cached_device_count", None)
    patches.set(cuda, "_device_count_nvml", native.device_count)
    properties = [device_properties(gpu, index) for index in range(MOST_GPUS)]
    patches.set(c, "_CudaDeviceProperties", DeviceProperties)
    patches.set(cuda, "_CudaDeviceProperties", DeviceProperties)
    of_device = askable(properties, asked)
    patches.set(cuda, "_get_device_properties", of_device)
    patches.set(c, "_cuda_getDeviceProperties", of_device)
    patches.set(torch.version, "cuda", CUDA_VERSION)
    patches.set(torch.backends.cuda, "is_built", lambda: True)
    patches.set(cuda, "has_magma", True)
    patches.set(torch, "has_cuda", True)
    streams.install(native, patches)
    timers.install(native, patches)
    graphs.install(native, patches)
    tensors.install(native, patches)
    comm.install(patches)
    nvml.install(native, gpu, patches, private)
    patches.on_undo(_forget_fake_results)


def _forget_fake_results() -> None:
    """FakeTensor keeps what calls gave, on the device that was current then."""
    if fake := sys.modules.get("torch._subclasses.fake_tensor"):
        fake.FakeTensorMode.cache_clear()


def allocator_conf() -> str:
    """The allocator configuration the program runs with, as torch reads it."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
