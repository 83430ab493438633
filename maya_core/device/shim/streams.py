"""torch.cuda.Stream and Event on the emulated device: torch's own classes, built again on bases of ours."""

from __future__ import annotations

import ctypes
import importlib.util
from types import ModuleType
from typing import Any

import torch

from maya_core.patches import Patches

CUDA = 1  # c10::DeviceType::CUDA


def bases(native: ModuleType) -> tuple[type, type]:
    """What torch._C._CudaStreamBase and _CudaEventBase are in a CUDA build."""

    class StreamBase(torch.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int = 0,
            device_type: int = CUDA,
            stream_ptr: int = 0,
            **_: Any,
        ) -> Any:
            if stream_id is None and stream_ptr:
                stream_id, device_index = native.stream_of_handle(stream_ptr), native.get_device()
            if stream_id is None:
                device_index = native.get_device()
                stream_id = native.stream_from_pool(device_index, priority)
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)

        @property
        def cuda_stream(self) -> int:
            return native.stream_handle(self.device_index, self.stream_id)

        @property
        def priority(self) -> int:
            return native.stream_priority(self.stream_id)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -5)

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.cuda_stream)

    class EventBase(torch.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            return super().__new__(
                cls,
                device=torch.device("cuda"),
                enable_timing=enable_timing,
                blocking=blocking,
                interprocess=interprocess,
            )

        def elapsed_time(self, end_event: torch.Event) -> float:
            return native.elapsed_ms(self.event_id, end_event.event_id)  # torch.Event's own takes no subclass

        @property
        def cuda_event(self) -> int:
            return self.event_id

    return StreamBase, EventBase


def again(module: ModuleType) -> ModuleType:
    """The module run once more, so that classes deriving from torch._C's take what stands there now."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def install(native: ModuleType, patches: Patches) -> None:
    stream_base, event_base = bases(native)
    patches.set(torch._C, "_CudaStreamBase", stream_base)
    patches.set(torch._C, "_CudaEventBase", event_base)
    fresh = again(torch.cuda.streams)
    for name in ("Stream", "Event", "ExternalStream"):
        cls = getattr(fresh, name)
        patches.set(torch.cuda.streams, name, cls)
        patches.set(torch.cuda, name, cls)
