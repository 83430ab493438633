"""Records what a program does besides calling its GPU: steps, batches, modules and files. Also skips work that would be wasted
under emulation, such as writing checkpoints and filling weights."""
