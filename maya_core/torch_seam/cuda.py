"""torch.cuda and the CUDA functions of torch._C beneath it. Names without versions are in torch 2.10 to 2.15."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from maya_core.torch_seam.names import Name, cuda
from maya_core.torch_seam.version import LAST, Version, installed


@dataclass(frozen=True)
class Libraries:
    """The libraries that a CUDA build of torch is released with, in the form in which torch states their versions."""

    cuda: str
    cudnn: int
    nccl: tuple[int, int, int]

    @property
    def cuda_number(self) -> int:
        """As CUDA_VERSION of cuda.h: 13000."""
        major, minor = self.cuda.split(".")
        return int(major) * 1000 + int(minor) * 10

    @property
    def nccl_number(self) -> int:
        """As torch's own function packs it."""
        major, minor, patch = self.nccl
        return major << 32 | minor << 16 | patch


LIBRARIES: dict[Version, Libraries] = {
    (2, 10): Libraries("12.8", 91002, (2, 27, 5)),
    (2, 11): Libraries("13.0", 91900, (2, 28, 9)),
    (2, 12): Libraries("13.0", 92000, (2, 29, 7)),
    (2, 13): Libraries("13.0", 92000, (2, 29, 7)),
    (2, 14): Libraries("13.0", 92400, (2, 30, 7)),
    (2, 15): Libraries("13.2", 92600, (2, 30, 7)),
}


def libraries() -> Libraries:
    """Those of the installed torch. A CPU build is emulated as the CUDA build of the same version."""
    return LIBRARIES.get(installed().version, LIBRARIES[LAST])


# ---- the runtime and the current device ----
INIT = cuda("_cuda_init")
IS_IN_BAD_FORK = cuda("_cuda_isInBadFork")
GET_DEVICE_COUNT = cuda("_cuda_getDeviceCount")
GET_DEVICE = cuda("_cuda_getDevice")
SET_DEVICE = cuda("_cuda_setDevice")
EXCHANGE_DEVICE = cuda("_cuda_exchangeDevice")
MAYBE_EXCHANGE_DEVICE = cuda("_cuda_maybeExchangeDevice")
CAN_DEVICE_ACCESS_PEER = cuda("_cuda_canDeviceAccessPeer")
HAS_PRIMARY_CONTEXT = cuda("_cuda_hasPrimaryContext")
SYNCHRONIZE = cuda("_cuda_synchronize")
SLEEP = cuda("_cuda_sleep")
IPC_COLLECT = cuda("_cuda_ipc_collect")
CUDART = cuda("_cudart")
HAS_CUDA = cuda("_has_cuda")
HAS_CUDNN = cuda("_has_cudnn")
# The state that torch.cuda keeps in Python.
PYTHON_CUDART = Name("torch.cuda", "_cudart")
PYTHON_EXCHANGE_DEVICE = Name("torch.cuda", "_exchange_device")
PYTHON_MAYBE_EXCHANGE_DEVICE = Name("torch.cuda", "_maybe_exchange_device")
PYTHON_IS_IN_BAD_FORK = Name("torch.cuda", "_is_in_bad_fork")
INITIALIZED = Name("torch.cuda", "_initialized")
CACHED_DEVICE_COUNT = Name("torch.cuda", "_cached_device_count")
DEVICE_COUNT_NVML = Name("torch.cuda", "_device_count_nvml")
DEFAULT_GENERATORS = Name("torch.cuda", "default_generators")

# ---- properties, versions and library handles ----
GET_DEVICE_PROPERTIES = cuda("_cuda_getDeviceProperties", late=True)
PYTHON_GET_DEVICE_PROPERTIES = Name("torch.cuda", "_get_device_properties", late=True)
DEVICE_PROPERTIES = cuda("_CudaDeviceProperties")
PYTHON_DEVICE_PROPERTIES = Name("torch.cuda", "_CudaDeviceProperties")
GET_ARCH_FLAGS = cuda("_cuda_getArchFlags")
GET_COMPILED_VERSION = cuda("_cuda_getCompiledVersion")
GET_CURRENT_BLAS_HANDLE = cuda("_cuda_getCurrentBlasHandle")
GET_CURRENT_SOLVER_HANDLE = cuda("_cuda_getCurrentSolverHandle", since=(2, 13))
CLEAR_CUBLAS_WORKSPACES = cuda("_cuda_clearCublasWorkspaces")
SET_SYNC_DEBUG_MODE = cuda("_cuda_set_sync_debug_mode")
GET_SYNC_DEBUG_MODE = cuda("_cuda_get_sync_debug_mode")
GET_CUDNN_BENCHMARK_LIMIT = cuda("_cuda_get_cudnn_benchmark_limit")
SET_CUDNN_BENCHMARK_LIMIT = cuda("_cuda_set_cudnn_benchmark_limit")
GET_CONV_BENCHMARK_EMPTY_CACHE = cuda("_cuda_get_conv_benchmark_empty_cache")
SET_CONV_BENCHMARK_EMPTY_CACHE = cuda("_cudnn_set_conv_benchmark_empty_cache")
NCCL_VERSION = cuda("_nccl_version")
NCCL_VERSION_SUFFIX = cuda("_nccl_version_suffix")
PYNVML = Name("torch.cuda", "pynvml", late=True)  # there only where nvidia-ml-py is installed
HAS_PYNVML = Name("torch.cuda", "_HAS_PYNVML")
NVML_DEVICE_INDEX = Name("torch.cuda", "_get_nvml_device_index")
MEMORY_NVML_DEVICE_INDEX = Name("torch.cuda.memory", "_get_nvml_device_index")
NVTX = Name("torch.cuda.nvtx", "_nvtx")

# ---- streams and events ----
STREAM_BASE = cuda("_CudaStreamBase")
EVENT_BASE = cuda("_CudaEventBase")
GET_CURRENT_STREAM = cuda("_cuda_getCurrentStream")
GET_CURRENT_RAW_STREAM = cuda("_cuda_getCurrentRawStream")
GET_DEFAULT_STREAM = cuda("_cuda_getDefaultStream")
GET_STREAM_FROM_EXTERNAL = cuda("_cuda_getStreamFromExternal")
SET_STREAM = cuda("_cuda_setStream")

# ---- memory ----
MEMORY_STATS = cuda("_cuda_memoryStats")
RESET_PEAK_MEMORY_STATS = cuda("_cuda_resetPeakMemoryStats")
RESET_ACCUMULATED_MEMORY_STATS = cuda("_cuda_resetAccumulatedMemoryStats")
HOST_MEMORY_STATS = cuda("_cuda_hostMemoryStats")
RESET_PEAK_HOST_MEMORY_STATS = cuda("_cuda_resetPeakHostMemoryStats")
RESET_ACCUMULATED_HOST_MEMORY_STATS = cuda("_cuda_resetAccumulatedHostMemoryStats")
EMPTY_CACHE = cuda("_cuda_emptyCache")
HOST_EMPTY_CACHE = cuda("_host_emptyCache")
SET_MEMORY_FRACTION = cuda("_cuda_setMemoryFraction")
GET_MEMORY_FRACTION = cuda("_cuda_getMemoryFraction")
ATTACH_OUT_OF_MEMORY_OBSERVER = cuda("_cuda_attach_out_of_memory_observer")
GET_ALLOCATOR_BACKEND = cuda("_cuda_getAllocatorBackend")
ENABLE_ALLOCATOR = cuda("_cuda_cudaCachingAllocator_enable")
IS_ALLOCATOR_ENABLED = cuda("_cuda_cudaCachingAllocator_is_enabled", since=(2, 12))
MEMORY_SNAPSHOT = cuda("_cuda_memorySnapshot")
RECORD_MEMORY_HISTORY = cuda("_cuda_record_memory_history")
RECORD_MEMORY_HISTORY_LEGACY = cuda("_cuda_record_memory_history_legacy")
IS_HISTORY_ENABLED = cuda("_cuda_isHistoryEnabled")
RAW_ALLOC = cuda("_cuda_cudaCachingAllocator_raw_alloc")
RAW_DELETE = cuda("_cuda_cudaCachingAllocator_raw_delete")

# ---- graphs and memory pools ----
GRAPH = cuda("_CUDAGraph")
GRAPH_POOL_HANDLE = cuda("_graph_pool_handle")
IS_CURRENT_STREAM_CAPTURING = cuda("_cuda_isCurrentStreamCapturing")
MEM_POOL = cuda("_MemPool")
BEGIN_ALLOCATE_TO_POOL = cuda("_cuda_beginAllocateToPool")
BEGIN_ALLOCATE_STREAM_TO_POOL = cuda("_cuda_beginAllocateCurrentStreamToPool")
BEGIN_ALLOCATE_THREAD_TO_POOL = cuda("_cuda_beginAllocateCurrentThreadToPool")
END_ALLOCATE_TO_POOL = cuda("_cuda_endAllocateToPool")
RELEASE_POOL = cuda("_cuda_releasePool")

# ---- what inductor's CUDA graph trees and generated code call ----
ALLOCATOR_STATE = cuda("_cuda_CUDAAllocator_AllocatorState")
GET_CHECKPOINT_STATE = cuda("_cuda_getCheckpointState")
SET_CHECKPOINT_POOL_STATE = cuda("_cuda_setCheckpointPoolState")
CHECK_POOL_LIVE_ALLOCATIONS = cuda("_cuda_checkPoolLiveAllocations")
CONSTRUCT_TENSOR = cuda("_construct_CUDA_Tensor_From_Storage_And_Metadata")
DATA_POINTERS_EQUAL = cuda("_tensors_data_ptrs_at_indices_equal")
FREE_AND_REMOVE_DELETER = cuda("_free_And_Remove_DeleterFn")
HAS_STANDARD_DELETER = cuda("_has_Standard_Deleter")
FORBID_TENSOR_ACCESS = cuda("_set_storage_access_error_msg")
FORBID_STORAGE_ACCESS = cuda("_set_storage_data_ptr_access_error_msg")
EMPTY_STRIDED = Name("torch._C._dynamo.guards", "_empty_strided_cuda")

# ---- copies between the GPUs of one process ----
BROADCAST = cuda("_broadcast")
BROADCAST_OUT = cuda("_broadcast_out")
BROADCAST_COALESCED = cuda("_broadcast_coalesced")
SCATTER = cuda("_scatter")
SCATTER_OUT = cuda("_scatter_out")
GATHER = cuda("_gather")
GATHER_OUT = cuda("_gather_out")

# ---- time ----
BENCHMARK_CLOCK = Name("torch.utils.benchmark.utils.timer", "timeit")


def lazy_init() -> None:
    """Initializes CUDA as torch.cuda does before its first use."""
    import torch

    torch.cuda._lazy_init()  # type: ignore[no-untyped-call]


def device_index(device: Any, optional: bool) -> int:
    """The number of the device that a user wrote in any of torch's ways."""
    import torch

    return int(torch.cuda._get_device_index(device, optional=optional))


def is_initialized() -> bool:
    return bool(INITIALIZED.get())


def forget_device_count() -> None:
    """Makes torch.cuda count its devices again."""
    import torch

    torch.cuda._cached_device_count = None


def cudnn_rnn_namespace() -> dict[str, Any]:
    """The globals of torch.backends.cudnn.rnn, which has `_cudnn` in a CUDA build.

    The attribute of torch.backends.cudnn is another object, and since 2.11 the module itself is behind a wrapper.
    """
    namespace: dict[str, Any] = importlib.import_module("torch.backends.cudnn.rnn").get_cudnn_mode.__globals__
    return namespace


def cudnn_enabled() -> bool:
    """torch.backends.cudnn.enabled, without the cost of reading it through the wrapper module."""
    import torch

    return bool(torch._C._get_cudnn_enabled())


def forget_fake_results() -> None:
    """Clears FakeTensor's cache, whose results name the device that was current when they were computed."""
    fake: ModuleType | None = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None:
        fake.FakeTensorMode.cache_clear()
