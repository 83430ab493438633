"""What Maya costs a program that does not use it. Goal: below 5 ms for each of its two parts.

    python tests/benchmarks/bench_import.py [ROUNDS]

It prints the time of Maya's own parts, each measured in a new process: what torch calls at the end of `import torch`, and the lines of the
.pth file; then `import torch` as a whole, with torch's search for entry points and without (TORCH_DEVICE_BACKEND_AUTOLOAD=0). The search goes
through every installed package, and torch makes it whether Maya is there or not. Times are of the processor, the least of all
rounds: other work on the machine does not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import maya_launchers

GOAL_MS = 5.0
TIMED = "import time; begun = time.process_time(); {what}; print(1e3 * (time.process_time() - begun))"
AUTOLOAD = "from maya_core.session.autoload import activate; activate()"


def milliseconds(rounds: int, what: str, before: str = "pass", autoload: bool = False) -> float:
    """The least of so many fresh processes."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    command = [sys.executable, "-c", f"{before}; {TIMED.format(what=what)}"]
    return min(
        float(subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    lines = next(Path(maya_launchers.__file__).parent.glob("*.pth")).read_text()
    parts = {
        "called by torch": milliseconds(rounds, AUTOLOAD, "import torch"),
        "the .pth file": milliseconds(rounds, f"exec({lines!r})"),
    }
    for name, taken in parts.items():
        print(f"{name}: {taken:.2f} ms, {'below' if taken < GOAL_MS else 'ABOVE'} {GOAL_MS} ms")
    whole, unsearched = (milliseconds(rounds, "import torch", autoload=on) for on in (True, False))
    print(
        f"import torch: {whole:.0f} ms, {unsearched:.0f} ms without a search for entry points, ratio {whole / unsearched:.3f}; "
        f"Maya's part of it {100 * sum(parts.values()) / whole:.2f} %"
    )


if __name__ == "__main__":
    main()
