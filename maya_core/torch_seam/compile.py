"""torch.compile: dynamo, inductor and Triton. Names without versions are in torch 2.10 to 2.15 and Triton 3.6 to 3.9."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.patches import Patches
from maya_core.torch_seam.names import Name
from maya_core.torch_seam.version import installed

# ---- dynamo ----
COMPILE = Name("torch._dynamo.convert_frame", "_compile")
CATCH_ERRORS = Name("torch._dynamo.convert_frame:CatchErrorsWrapper", "__call__")
INITIALIZE_OPTIMIZED_MODULE = Name("torch._dynamo.eval_frame:OptimizedModule", "_initialize")
UNPATCHED_MODULE_CALL = Name("torch._dynamo.variables.nn_module", "unpatched_nn_module_call")
CLOSURE_MATCH = Name("torch._dynamo.guards:GuardBuilder", "CLOSURE_MATCH")
INSTALL_CALLBACKS = Name("torch._dynamo.callback:CompilationCallbackHandler", "install_callbacks")
COMPILATION_METRICS = Name("torch._dynamo.utils", "_compilation_metrics")

# ---- inductor ----
BENCHMARKS = tuple(
    Name(f"torch._inductor.runtime.benchmarking:{owner}", method, since=since)
    for owner, method, since in (
        ("Benchmarker", "benchmark_gpu", (2, 10)),
        ("TritonBenchmarker", "benchmark_gpu", (2, 10)),
        ("InductorBenchmarker", "benchmark_gpu", (2, 10)),
        ("Benchmarker", "benchmark_gpu_with_cuda_graph", (2, 12)),
        ("InductorBenchmarker", "benchmark_gpu_with_cuda_graph", (2, 12)),
        ("TorchProfilerBenchmarker", "benchmark_gpu", (2, 13)),
    )
)
# The function that decides whether to pad a product, with tensors that it makes for the purpose.
SHOULD_PAD = (
    Name("torch._inductor.fx_passes.pad_mm", "_should_pad_bench", until=(2, 11)),
    Name("torch._inductor.fx_passes.pad_mm", "_should_pad", since=(2, 11)),
)
BENCHMARK_CHOICES = (
    Name("torch._inductor.select_algorithm:AlgorithmSelectorCache", "benchmark_choices"),
    Name("torch._inductor.select_algorithm:AlgorithmSelectorCache", "benchmark_in_current_process"),
)
DEFINE_KERNEL = Name("torch._inductor.codegen.triton:TritonScheduling", "define_kernel")
TEMPLATE_META = Name("torch._inductor.select_algorithm:TritonTemplateKernel", "inductor_meta_common")
TUNERS = "torch._inductor.runtime.triton_heuristics"
PRECOMPILE = Name(f"{TUNERS}:CachingAutotuner", "precompile")
BENCH = Name(f"{TUNERS}:CachingAutotuner", "bench")
TUNER_PLUGINS = Name(TUNERS, "get_caching_autotuner_plugins", since=(2, 13))
FURTHER_TUNING = (
    Name(f"{TUNERS}:CachingAutotuner", "coordinate_descent_tuning"),
    Name(f"{TUNERS}:CachingAutotuner", "_combo_sequential_autotune", since=(2, 12)),
)
CREATE_BLOCK_MASK = Name("torch.nn.attention.flex_attention", "create_block_mask")
CONFIGS = {"inductor": "torch._inductor.config", "dynamo": "torch._dynamo.config"}
COMPILE_THREADS = Name("torch._inductor.async_compile", "get_compile_threads")
DYNAMO = "torch._dynamo"
ENTRY = "torch._inductor.compile_fx"  # imported when inductor compiles for the first time

# ---- Triton ----
RUN_KERNEL = Name("triton.runtime.jit:JITFunction", "run")
RUN_TUNER = Name("triton.runtime.autotuner:Autotuner", "run")
DRIVER = "triton.runtime.driver"

# Modules whose cached functions depend on the device. Other caches must stay: a function that registers patterns runs only once.
ABOUT_DEVICE = (
    "torch.utils._triton",
    "torch._dynamo.device_interface",
    "torch._inductor.utils",
    "torch._inductor.codecache",
    "torch._inductor.runtime.hints",
    "torch._inductor.runtime.runtime_utils",
    "torch._inductor.codegen.triton",
)
NAMES = (*BENCHMARKS, *SHOULD_PAD, *BENCHMARK_CHOICES, *FURTHER_TUNING)  # of the tuples above, for the seam test


def static_launcher_setting() -> str:
    """The setting of inductor with which compiled kernels are launched without Triton."""
    return "use_static_cuda_launcher" if installed().version < (2, 11) else "use_static_triton_launcher"


def set_in_all_threads(patches: Patches, config: Any, name: str, value: Any) -> None:
    """Changes a setting of dynamo or inductor. What is assigned to it counts in the thread that assigns it only; other threads, such as
    autograd's, see the default."""
    before = getattr(config, name)
    entry = config._config[name]
    while getattr(entry, "alias", None) is not None:  # the full name of another setting
        module, _, other = entry.alias.rpartition(".")
        entry = importlib.import_module(module)._config[other]
    patches.set(entry, "default", value)
    setattr(config, name, value)
    patches.on_undo(functools.partial(setattr, config, name, before))


def size_hint(size: Any) -> int:
    """The number that inductor assumes for a size, which may be a symbol."""
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    return int(sizes.size_hint(size) if installed().version < (2, 11) else sizes.optimization_hint(size))


def current_wrapper() -> Any:
    """The code that inductor is generating now."""
    from torch._inductor.virtualized import V

    return V.graph.wrapper_code


def original_function(compiled: Any) -> Any | None:
    """The function that torch.compile was given; None if nothing was compiled."""
    return getattr(compiled, "_torchdynamo_orig_callable", None)


def skip_frame() -> Any:
    """What tells dynamo to skip a frame, and the functions that it calls."""
    module = sys.modules["torch._dynamo.convert_frame"]
    skip = module.FrameAction.SKIP
    return module.ConvertFrameReturn(frame_exec_strategy=module.FrameExecStrategy(skip, skip))


def disable_hooks(patches: Patches, ours: Callable[[Any], bool], reason: str) -> None:
    """Excludes optimizer hooks from tracing, once dynamo is imported."""
    from torch.optim import optimizer

    def disable(dynamo: ModuleType) -> None:
        for table in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
            for number, hook in list(table.items()):
                if ours(hook):
                    table[number] = dynamo.disable(hook, reason=reason)

    patches.when_imported(DYNAMO, disable)


def has_compiled() -> bool:
    """Whether dynamo has compiled anything in this process. Optimizers import it without compiling."""
    tracer = sys.modules.get("torch._dynamo.convert_frame")
    return tracer is not None and bool(tracer.FRAME_COUNTER)


def reset() -> None:
    """Forgets compiled code, and cached answers about the device."""
    import torch

    if has_compiled():  # otherwise a reset would import inductor
        torch._dynamo.reset()
    if inductor := sys.modules.get("torch._inductor.utils"):
        inductor.clear_caches()
    for module in filter(None, map(sys.modules.get, ABOUT_DEVICE)):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in (module, *(one for one in classes if one.__module__ == module.__name__)):
            for value in list(vars(owner).values()):
                cached = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if isinstance(cached, functools._lru_cache_wrapper):
                    cached.cache_clear()


def dynamo_utils() -> ModuleType | None:
    """dynamo's records of what it did; None if the program has not imported it."""
    return sys.modules.get("torch._dynamo.utils")


def forget_graph_breaks(patches: Patches) -> None:
    """Counts graph breaks from zero, once dynamo is imported."""
    patches.when_imported("torch._dynamo.utils", lambda module: module.counters["graph_break"].clear())


def packet(op: Any) -> Any:
    """`aten.add` of `aten.add.Tensor`."""
    return getattr(op, "_overloadpacket", op)
