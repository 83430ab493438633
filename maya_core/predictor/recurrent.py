"""cuDNN's recurrent layers: one large product over all steps for the input, then step by step a small one for the state.

The products are priced as products. A step has a floor of its own: its launches, or the barrier of a persistent kernel.
Backward multiplies twice as much, once step by step and once over all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

# What DeepBench measured: one layer in one direction, of these sizes.
MEASURED_HIDDEN, MEASURED_BATCH = (256, 4096), (8, 128)

Product = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # seconds of products m, n, k


class RecurrentModel(BaseModel):
    """Forward or backward, of one dtype."""

    model_config = ConfigDict(extra="forbid")

    step_us: float  # per step and layer, beside its product
    step_share: float  # of a separate product's time, that the product of one step takes
    whole_share: float  # of a separate product's time, that products over all steps take


def parts(product: Product, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of all steps' products one by one, of the products over all steps, and how many steps there are."""
    backward, gates, layers, directions, steps, batch, given, hidden, _ = sizes.T
    columns = gates * hidden
    one_step = product(batch, np.where(backward > 0, hidden, columns), np.where(backward > 0, columns, hidden))
    first = product(steps * batch, columns, given)
    deeper = product(steps * batch, columns, directions * hidden)
    weights = product(columns, hidden, steps * batch)
    whole = directions * (first + (layers - 1) * deeper)
    whole = np.where(backward > 0, 2 * whole + directions * layers * weights, whole)
    count = layers * directions * steps
    return count * one_step, whole, count


def seconds(model: RecurrentModel | dict[str, Any], product: Product, sizes: np.ndarray) -> np.ndarray:
    """A row of `sizes` is as `kernels` describes recurrent layers."""
    fitted = model if isinstance(model, RecurrentModel) else RecurrentModel.model_validate(model)
    sizes = np.atleast_2d(np.asarray(sizes, float))
    stepwise, whole, count = parts(product, sizes)
    empty = np.prod(sizes[:, 2:8], axis=1) == 0
    total = fitted.step_us * 1e-6 * count + fitted.step_share * stepwise + fitted.whole_share * whole
    return np.where(empty, 0.0, total)


def among_measured(sizes: np.ndarray) -> np.ndarray:
    """Whether layers are of a kind that was measured."""
    _, _, layers, directions, _, batch, _, hidden, _ = sizes.T
    one = (layers == 1) & (directions == 1)
    between = [
        (low <= size) & (size <= high) for size, (low, high) in ((hidden, MEASURED_HIDDEN), (batch, MEASURED_BATCH))
    ]
    return one & np.logical_and.reduce(between)
