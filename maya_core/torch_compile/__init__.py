"""torch.compile on the emulated device. Inductor's own code generation runs; its kernels are recorded, but never compiled or launched.

| module | its responsibility |
|---|---|
| caches | private cache folders for inductor and Triton, and clearing what torch caches about the device in memory |
| dynamo | hides from the tracer what Maya adds to modules and optimizers |
| driver | the emulated GPU for Triton |
| description | what inductor knows about a kernel while it generates it: bytes, loads, stores, sizes, fused ops and their lines |
| source | what the source of a Triton kernel says about its memory traffic |
| templates | the products, convolutions and attention of inductor's templates |
| block_masks | the block masks of flex_attention |
| launchers | kernels whose launch is recorded |
| configurations | which of several tile configurations runs |
| benchmarks | predicted durations where inductor would measure |
| graph_trees | mode="reduce-overhead": CUDA graph trees on the emulated allocator |
| user_kernels | Triton kernels of the program itself |
| compile_record | what was compiled, how often and why, for the trace |

A program that compiles nothing does not import the patched modules, and pays nothing.
"""

from maya_core.torch_compile.install import TorchCompile

__all__ = ["TorchCompile"]
