"""Which kernels a call of the trace launches, and the sizes that decide how long each takes.

One module per group of ops, each a table from an op's name to its chain of kernels; the sources they follow are those of
torch 2.13, named in each. Any op without an entry reads every input once and writes every result once, element by element.
How many kernels a call launches is the device's to say (`maya_core/device/kernels`): the chain is fitted to that number.
"""

from maya_core.predictor.kernels.kernel import Kernel
from maya_core.predictor.kernels.table import kernels_of

__all__ = ["Kernel", "kernels_of"]
