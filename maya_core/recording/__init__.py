"""What a program does beside calling its GPU, noted while it is emulated: steps, batches, modules, files; and what is not done for real."""
