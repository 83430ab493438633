# When it is imported, torch.distributed.nn binds the current world group as a default argument, and here there is none yet. A program imports it
# once, in its only world, while these tests have many worlds.
import torch.distributed.nn.functional  # noqa: F401
