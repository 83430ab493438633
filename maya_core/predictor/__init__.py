"""Predicts the duration of every kernel, copy and collective.

There is one module for each family of work: `gemm_time`, `attention_time`, `convolution_time`, `streaming_time` (kernels that are bound by
moving bytes), `recurrent_time`, `copy_time` and `collective_time`. Each models the structure of its kernels (tiles, waves, roofline, launch
floor) and takes its coefficients from `profiles/`, which `fitting/` makes from measurements. `pricing` gives a trace its durations.
maya_core/ops decides which kernels an op launches.
"""
