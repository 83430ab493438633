"""torch.compile on the emulated device: inductor's own code generation runs, its kernels are recorded and never compiled or launched.

| module | what it sees to |
|---|---|
| caches | private folders for what inductor and Triton keep, and what is remembered of the device in memory |
| dynamo | torch as the tracer would see it on a GPU, without what Maya adds to modules and optimizers |
| driver | the emulated GPU as Triton knows it |
| description | what inductor knows of a kernel while it writes it: bytes, loads, stores, sizes, fused ops and their lines |
| launchers | kernels that record themselves; which of several tile configurations runs |
| benchmarks | whatever inductor would time, priced instead |
| graphs | mode="reduce-overhead": CUDA graph trees on the emulated allocator |
| user_kernels | kernels that the program itself wrote in Triton |
| record | what was compiled, how often and why, for the trace |

A program that compiles nothing imports none of what is patched here, and pays nothing. Checked with torch 2.13 and triton 3.7.
"""

from maya_core.torch_compile.install import TorchCompile

__all__ = ["TorchCompile"]
