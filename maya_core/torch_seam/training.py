"""What surrounds a training step: data loaders, checkpoints and compiled modules. Names without versions are in torch 2.10 to 2.15."""

from __future__ import annotations

from typing import Any

from maya_core.torch_seam.names import Name

ORIGINAL_MODULE = "_orig_mod"  # the attribute under which torch.compile's wrapper keeps the module that it wraps
NEXT_BATCH = Name("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__")

# What a data loader makes a batch with, in its workers or in the program's process.
FETCH = (
    Name("torch.utils.data._utils.fetch:_MapDatasetFetcher", "fetch"),
    Name("torch.utils.data._utils.fetch:_IterableDatasetFetcher", "fetch"),
)

# ---- torch.save and torch.load ----
OPEN_WRITER = Name("torch.serialization", "_open_zipfile_writer")
OPEN_READER = Name("torch.serialization", "_open_zipfile_reader")

# ---- torch.distributed.checkpoint ----
SAVER = "torch.distributed.checkpoint.state_dict_saver"
SAVE_STATE_DICT = Name(SAVER, "_save_state_dict")
ASYNC_EXECUTORS = (
    Name(SAVER, "_ThreadBasedAsyncCheckpointExecutor"),
    Name(SAVER, "_ProcessBasedAsyncCheckpointExecutor"),
)
LOAD_STATE_DICT = Name("torch.distributed.checkpoint.state_dict_loader", "_load_state_dict")
STAGE = Name("torch.distributed.checkpoint.staging:DefaultStager", "stage")
STAGE_BLOCKING = Name("torch.distributed.checkpoint.staging:BlockingAsyncStager", "stage")
# Creates the state of an optimizer by a step with zero gradients, before a checkpoint is made or read.
INIT_OPTIM_STATE = Name("torch.distributed.checkpoint.state_dict", "_init_optim_state")
NAMES = (*ASYNC_EXECUTORS, *FETCH)  # of the tuples above, for the seam test


def index_sampler(iterator: Any) -> Any | None:
    """The sampler from which a data loader's iterator takes the indices of a batch."""
    return iterator._index_sampler


def workers_of(iterator: Any) -> int:
    """The number of workers of a data loader's iterator."""
    return int(iterator._num_workers)


def reader_of(path: str) -> Any:
    """torch's reader of the records of a checkpoint."""
    import torch

    return torch._C.PyTorchFileReader(path)


def stages_in_background(stager: Any) -> bool:
    """Whether a stager of asynchronous checkpoints copies in a thread of its own."""
    return bool(stager._config.use_async_staging)


def original_module(module: Any) -> Any:
    """The module that torch.compile wrapped; any other module itself."""
    return getattr(module, ORIGINAL_MODULE, module)
