"""cuDNN's recurrent layers: one large product over all steps for the input, then a small product for the state in each step.

The products are predicted as such. A step has a floor: its launches, or the barrier of a persistent kernel. Backward multiplies twice as much,
once step by step and once over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from maya_core.ops import kernel
from maya_core.ops.kernel import Columns
from maya_core.predictor import gemm_time
from maya_core.predictor.durations import Durations
from maya_core.predictor.family import Family, by_model, in_order, known

# The range of DeepBench's measurements: one layer in one direction, with these sizes.
MEASURED_HIDDEN, MEASURED_BATCH = (256, 4096), (8, 128)

Product = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # seconds of products m, n, k


class RecurrentModel(BaseModel):
    """The coefficients of forward or backward for one dtype."""

    model_config = ConfigDict(extra="forbid")

    step_us: float  # for each step and layer, in addition to its product
    step_share: float  # duration of the product of one step, as a share of a separate product's
    whole_share: float  # duration of products over all steps, as a share of separate products'


def parts(product: Product, those: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The seconds of the products of single steps, the seconds of the products over all steps, and the number of steps."""
    steps, batch, hidden, directions, layers = those.steps, those.batch, those.hidden, those.directions, those.layers
    backward, columns = those.backward > 0, those.gates * those.hidden
    one_step = product(batch, np.where(backward, hidden, columns), np.where(backward, columns, hidden))
    first = product(steps * batch, columns, those.given)
    deeper = product(steps * batch, columns, directions * hidden)
    weights = product(columns, hidden, steps * batch)
    whole = directions * (first + (layers - 1) * deeper)
    whole = np.where(backward, 2 * whole + directions * layers * weights, whole)
    count = layers * directions * steps
    return count * one_step, whole, count


def seconds(model: RecurrentModel | dict[str, Any], product: Product, those: Columns) -> np.ndarray:
    fitted = model if isinstance(model, RecurrentModel) else RecurrentModel.model_validate(model)
    stepwise, whole, count = parts(product, those)
    empty = count * those.batch * those.given * those.hidden == 0
    total = fitted.step_us * 1e-6 * count + fitted.step_share * stepwise + fitted.whole_share * whole
    return np.where(empty, 0.0, total)


def among_measured(those: Columns) -> np.ndarray:
    """Whether layers are within the range of the measurements."""
    one = (those.layers == 1) & (those.directions == 1)
    between = [
        (low <= size) & (size <= high)
        for size, (low, high) in ((those.hidden, MEASURED_HIDDEN), (those.batch, MEASURED_BATCH))
    ]
    answer: np.ndarray = one & np.logical_and.reduce(between)
    return answer


class RecurrentLayers(Family[kernel.Recurrent]):
    name, title, compute_bound = "recurrent", "recurrent", True

    def predict(self, kernels: Sequence[kernel.Recurrent]) -> Durations:
        return by_model(kernels, self._of_dtype)

    def _of_dtype(self, dtype: str, kernels: list[kernel.Recurrent]) -> Durations:
        found = []
        for backward, name in enumerate(("forward", "backward")):
            places = [place for place, each in enumerate(kernels) if each.backward == backward]
            if places:
                found.append((places, self._one_way(dtype, name, Columns(kernels[place] for place in places))))
        return in_order(found)

    def _one_way(self, dtype: str, direction: str, those: Columns) -> Durations:
        def product(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
            return gemm_time.price(self.target, dtype, np.ones_like(m), m, n, k, np.zeros_like(m)).seconds

        half = "float16" if dtype in ("bfloat16", "float16") else "float32"
        profile = self.target.find("recurrent", (f"{half} {direction}",))
        if profile is None:
            sizes = (
                those.gates * those.layers * those.directions * those.steps * those.batch * those.given * those.hidden
            )
            return self.target.bound(dtype, sizes)
        found, model = profile
        taken = seconds(found.profile.models[model], product, those)
        return known(taken, among_measured(those) & (half == dtype), found)
