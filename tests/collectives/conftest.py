# torch.distributed.nn binds the world group of the moment as a default argument when it is imported: here there is none
# yet. A program imports it once, in its one world; these tests have many.
import torch.distributed.nn.functional  # noqa: F401
