"""Called by torch itself at the end of `import torch` (entry point group torch.backends): does nothing unless
`maya run` asked for an emulation in this process. Kept tiny: an error here would break `import torch`."""

import os


def activate() -> None:
    if "MAYA_EMULATE" in os.environ:
        from maya_core.session.process import emulate_this_process

        emulate_this_process()
