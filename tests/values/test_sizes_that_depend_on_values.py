"""Where sizes depend on what a model returns, the limits that Maya gives hold the truth, which the CPU computes."""

from __future__ import annotations

import pytest
import torch
from values.size_programs import PROGRAMS, Program

import maya_core
from maya_core.launch.settings import ProcessSettings
from maya_core.report.prediction import Prediction
from maya_core.session.block import EmulatedBlock
from maya_core.trace.unknown_read import Extreme


def emulated(
    program: Program, unknown: Extreme | None = None, assume: dict[str, float] | None = None
) -> tuple[list[int], Prediction]:
    block: EmulatedBlock = maya_core.emulate("h100", assume=assume or {})
    settings: ProcessSettings = block._settings
    block._settings = settings.model_copy(update={"unknown": unknown})
    with block as job:
        sizes = program("cuda")
    return sizes, job.prediction


def peak(prediction: Prediction) -> int:
    (row,) = prediction.memory.ranks
    return row.peak_allocated_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_limits_hold_the_truth(name: str) -> None:
    torch.manual_seed(0)
    true = PROGRAMS[name]("cpu")
    none, at_least = emulated(PROGRAMS[name], "none")
    every, at_most = emulated(PROGRAMS[name], "all")
    taken, sampled = emulated(PROGRAMS[name])
    assert sampled.unknown_values and sampled.memory.fits is None
    for low, truth, sample, high in zip(none, true, taken, every, strict=True):
        assert min(low, high) <= truth <= max(low, high)
        assert min(low, high) <= sample <= max(low, high)
    assert none != every
    assert peak(at_least) <= peak(sampled) <= peak(at_most)


@pytest.mark.parametrize(
    "name", ["boxes_above_a_score", "overlaps_of_kept_boxes", "both_sides_of_a_mask", "active_neurons"]
)
def test_what_the_user_says_is_within_the_limits(name: str) -> None:
    """With the share that the CPU finds, sizes are the true ones, and memory lies within the limits."""
    program = PROGRAMS[name]
    true = program("cpu")
    _, sampled = emulated(program)
    place = sampled.memory.depends_on[0]
    elements = {
        "boxes_above_a_score": 20_000,
        "overlaps_of_kept_boxes": 4000,
        "both_sides_of_a_mask": 10_000,
        "active_neurons": 512 * 256,
    }
    sizes, said = emulated(program, assume={place: true[0] / elements[name]})
    assert abs(sizes[0] - true[0]) <= 1
    assert said.memory.fits is True
    limits = [peak(emulated(program, extreme)[1]) for extreme in ("none", "all")]
    assert limits[0] <= peak(said) <= limits[1]


def test_there_are_twenty_programs() -> None:
    assert len(PROGRAMS) >= 20
