"""How long every kernel, copy and collective takes.

One module per family of work: `gemm`, `attention`, `convolution`, `memory` (whatever is bound by moving bytes),
`recurrent`, `copies`, `collectives`. Each states the structure of its kernels (tiles, waves, roofline, launch floor) and
takes its coefficients from `profiles/`, which `fitting/` makes from measurements. `kernels` says which kernels an ATen op
launches, `predict` gives a trace its durations.
"""
