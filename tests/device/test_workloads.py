"""Small training runs have the peaks and kernel counts of real CUDA torch, of the installed version, over a fake runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
from device import workload_figures

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("gpu", workload_figures.GPUS)
@pytest.mark.parametrize("script", workload_figures.SCRIPTS, ids=lambda script: script.stem)
def test_a_training_run_is_what_cuda_torch_does(script: Path, gpu: str) -> None:
    assert workload_figures.emulated(script, gpu) == workload_figures.recorded()[script.stem, gpu]
