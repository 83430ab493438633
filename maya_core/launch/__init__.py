"""Running programs on the emulated device: activation, module names, step counting, stopping, and `maya run`."""
