"""torch.cuda.Stream and Event on the emulated device: torch's own classes, defined again on base classes that call the native device."""

from __future__ import annotations

import ctypes
import importlib.util
from types import ModuleType
from typing import Any

import torch

from maya_core.patches import Patches
from maya_core.torch_seam import cuda as seam

CUDA = 1  # c10::DeviceType::CUDA


def _stream_class(native: ModuleType) -> type:
    """What torch._C._CudaStreamBase is in a CUDA build."""

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
            return int(native.stream_handle(self.device_index, self.stream_id))

        @property
        def priority(self) -> int:
            return int(native.stream_priority(self.stream_id))

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -5)

        @property
        def _as_parameter_(self) -> ctypes.c_void_p:
            return ctypes.c_void_p(self.cuda_stream)

    return StreamBase


def _event_class(native: ModuleType) -> type:
    """What torch._C._CudaEventBase is in a CUDA build."""

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
            # torch.Event's own method does not accept a subclass.
            return float(native.elapsed_ms(self.event_id, end_event.event_id))

        @property
        def cuda_event(self) -> int:
            return self.event_id

    return EventBase


def rerun(module: ModuleType) -> ModuleType:
    """Executes a module a second time, so that its classes derive from the base classes that torch._C has now."""
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def install(native: ModuleType, patches: Patches) -> None:
    seam.STREAM_BASE.replace(patches, _stream_class(native))
    seam.EVENT_BASE.replace(patches, _event_class(native))
    fresh = rerun(torch.cuda.streams)
    for name in ("Stream", "Event", "ExternalStream"):
        cls = getattr(fresh, name)
        patches.set(torch.cuda.streams, name, cls)
        patches.set(torch.cuda, name, cls)
