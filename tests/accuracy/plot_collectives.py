"""Draws docs/images/collectives.svg: predicted bus bandwidth of all_reduce against message size.

python tests/accuracy/plot_collectives.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from maya_core.hardware.cluster import cluster
from maya_core.predictor.collective_time import predict
from maya_core.predictor.durations import Provenance
from maya_core.predictor.placement import place

OUT = Path(__file__).parents[2] / "docs" / "images" / "collectives.svg"
GROUPS = [
    ("8 x B200", cluster("b200", 8)),
    ("8 x H100", cluster("h100", 8)),
    ("2 nodes of 8 x H100, 8 ports of 400 Gb/s", cluster("h100", 8, nodes=2)),
    ("8 x A100", cluster("a100", 8)),
]


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "maya", "svg.fonttype": "none"})
    sizes = 2.0 ** np.arange(10, 34.01, 0.25)
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for label, machine in GROUPS:
        n = machine.gpus
        found = predict("all_reduce", sizes, place(range(n), machine), machine)
        bus = 2 * (n - 1) / n * sizes / found.seconds / 1e9
        (line,) = axes.plot(sizes, bus, linestyle=":", linewidth=1.2)
        within = np.where(found.provenance == Provenance.INTERPOLATED, bus, np.nan)
        axes.plot(sizes, within, color=line.get_color(), linewidth=2, label=label)
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(10, 35, 4)]
    axes.set_xticks(ticks, ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "1 GiB", "16 GiB"])
    axes.set_xlabel("message size")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_title("all_reduce, predicted (dotted: outside of measurements)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
