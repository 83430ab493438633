"""nvidia-smi for the programs that a training script starts: a small script in a folder at the front of PATH.

The script sends its arguments through a socket to the process with the emulated GPUs and prints the answer, so that memory
figures are current.
"""

from __future__ import annotations

import json
import os
import shutil
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from maya_core.patches import Patches
from maya_core.sockets import folder_for_sockets

if TYPE_CHECKING:
    from maya_core.device.shim.nvml import Node

MIB = 2**20

CLIENT = """#!{python} -SE
import json, socket, sys
try:
    line = socket.socket(socket.AF_UNIX)
    line.connect({path!r})
except OSError:
    sys.exit("NVIDIA-SMI has failed: the process with the emulated GPUs is gone.")
line.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
answer = json.loads(line.makefile().read())
sys.stdout.write(answer["out"])
sys.exit(answer["code"])
"""


class Refused(Exception):
    """Raised for an argument that nvidia-smi, or this replacement of it, does not accept."""


def fields(node: Node) -> dict[str, Callable[[int], tuple[str, str]]]:
    """The fields of --query-gpu: for each a function from a GPU's index to its value and unit."""
    from maya_core.device.shim import nvml

    def mib(part: int) -> Callable[[int], tuple[str, str]]:
        return lambda index: (str(node.memory(index)[part] // MIB), "MiB")

    def text(value: object, unit: str = "") -> Callable[[int], tuple[str, str]]:
        return lambda index: (str(value), unit)

    def watts(index: int) -> tuple[str, str]:
        return f"{node.watts():.2f}", "W"

    clocks = {
        "graphics": node.gpu.boost_clock_mhz,
        "gr": node.gpu.boost_clock_mhz,
        "sm": node.gpu.boost_clock_mhz,
        "memory": node.gpu.memory_clock_mhz,
    }
    clocks["mem"] = node.gpu.memory_clock_mhz
    answers = {
        "index": lambda index: (str(index), ""),
        "count": lambda index: (str(node.count), ""),
        "name": text(node.gpu.driver_name),
        "gpu_name": text(node.gpu.driver_name),
        "uuid": lambda index: (node.uuid(index), ""),
        "gpu_uuid": lambda index: (node.uuid(index), ""),
        "pci.bus_id": lambda index: (node.bus_id(index), ""),
        "gpu_bus_id": lambda index: (node.bus_id(index), ""),
        "driver_version": text(nvml.DRIVER_VERSION),
        "compute_cap": text("{}.{}".format(*node.gpu.compute_capability)),
        "compute_mode": text("Default"),
        "persistence_mode": text("Enabled"),
        "mig.mode.current": text("Disabled"),
        "pstate": text("P0"),
        "timestamp": lambda index: (datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3], ""),
        "memory.total": mib(0),
        "memory.used": mib(1),
        "memory.free": mib(2),
        "utilization.gpu": text(nvml.AT_WORK.utilization_percent, "%"),
        "utilization.memory": text(nvml.AT_WORK.memory_utilization_percent, "%"),
        "temperature.gpu": text(nvml.AT_WORK.temperature_c),
        "power.draw": watts,
        "power.limit": watts,
        "enforced.power.limit": watts,
        "fan.speed": text("[N/A]"),
    }
    for name, mhz in clocks.items():
        for kind in ("current", "max"):
            answers[f"clocks.{kind}.{name}"] = text(int(mhz), "MHz")
        answers[f"clocks.{name}"] = text(int(mhz), "MHz")
    return answers


def query(node: Node, names: list[str], options: set[str], chosen: list[int]) -> str:
    known = fields(node)
    for name in names:
        if name not in known:
            raise Refused(f'Field "{name}" is not a valid field to query.\n')
    with_units = "nounits" not in options
    rows = []
    if "noheader" not in options:
        units = {name: known[name](chosen[0])[1] for name in names} if chosen else {}
        rows.append(", ".join(f"{name} [{units[name]}]" if units.get(name) else name for name in names))
    for index in chosen:
        cells = (known[name](index) for name in names)
        rows.append(", ".join(f"{value} {unit}" if unit and with_units else value for value, unit in cells))
    return "\n".join(rows) + "\n"


def processes(node: Node, names: list[str], options: set[str], chosen: list[int]) -> str:
    """The answer to --query-compute-apps: this process is the only one."""
    header = {"used_memory": "used_gpu_memory [MiB]", "used_gpu_memory": "used_gpu_memory [MiB]"}
    unit = "" if "nounits" in options else " MiB"
    rows = [] if "noheader" in options else [", ".join(header.get(name, name) for name in names)]
    for index in chosen:
        used = f"{node.memory(index)[1] // MIB}{unit}"
        known = {
            "pid": str(os.getpid()), "process_name": sys.executable, "name": sys.executable, "gpu_uuid": node.uuid(index),
            "gpu_name": node.gpu.driver_name, "gpu_bus_id": node.bus_id(index), "used_memory": used, "used_gpu_memory": used,
        }  # fmt: skip
        if unknown := [name for name in names if name not in known]:
            raise Refused(f'Field "{unknown[0]}" is not a valid field to query.\n')
        rows.append(", ".join(known[name] for name in names))
    return "\n".join(rows) + "\n"


def listing(node: Node, chosen: list[int]) -> str:
    return "".join(f"GPU {index}: {node.gpu.driver_name} (UUID: {node.uuid(index)})\n" for index in chosen)


def topology(node: Node) -> str:
    """The answer to `topo -m`: all GPUs are on one NVSwitch, or on the PCIe of one NUMA node."""
    link = f"NV{node.nvlinks()}" if node.nvlinks() else "NODE"
    names = [f"GPU{index}" for index in range(node.count)]
    rows = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    cpus = f"0-{(os.cpu_count() or 1) - 1}"
    for name in names:
        rows.append("\t".join([name, *(" X " if other == name else link for other in names), cpus, "0", "N/A"]))
    legend = "\n\nLegend:\n\n  X    = Self\n  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node\n"
    return "\n".join(rows) + legend + "  NV#  = Connection traversing a bonded set of # NVLinks\n"


def table(node: Node, chosen: list[int]) -> str:
    """The table that `nvidia-smi` prints without arguments."""
    from maya_core.device.shim import nvml

    bar = "+-----------------------------------------+------------------------+----------------------+\n"
    power = f"{node.watts()}W / {node.watts():>4}W"
    lines = [
        datetime.now().strftime("%a %b %e %H:%M:%S %Y") + "       \n",
        "+-----------------------------------------------------------------------------------------+\n",
        f"| NVIDIA-SMI {nvml.DRIVER_VERSION:<15}         Driver Version: {nvml.DRIVER_VERSION:<14}CUDA Version: 13.0     |\n",
        bar,
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n",
        bar.replace("-", "=").replace("+", "|", 1)[:-2] + "|\n",
    ]
    for index in chosen:
        total, used, _ = node.memory(index)
        usage = f"{used // MIB}MiB / {total // MIB:>6}MiB"
        lines.append(
            f"| {index:>3}  {node.gpu.driver_name:<30.30} On  |   {node.bus_id(index)} Off |                    0 |\n"
        )
        lines.append(
            f"| N/A  {nvml.AT_WORK.temperature_c:>3}C    P0  {power:>22} | {usage:>22} | {nvml.AT_WORK.utilization_percent:>6}%      Default |\n"
        )
        lines.append(bar)
    lines.append("\n+-----------------------------------------------------------------------------------------+\n")
    lines.append("| Processes:                                                                              |\n")
    lines.append("|  GPU   GI   CI        PID   Type   Process name                              GPU Memory |\n")
    for index in chosen:
        lines.append(
            f"| {index:>4}  N/A  N/A {os.getpid():>10}      C   {Path(sys.executable).name:<39} {node.memory(index)[1] // MIB:>9}MiB |\n"
        )
    lines.append("+-----------------------------------------------------------------------------------------+\n")
    return "".join(lines)


def _selected(node: Node, wanted: str | None) -> list[int]:
    if wanted is None:
        return list(range(node.count))
    chosen = []
    for name in wanted.split(","):
        matches = [i for i in range(node.count) if name in (str(i), node.uuid(i), node.bus_id(i))]
        if not matches:
            raise Refused("No devices were found\n")
        chosen += matches
    return chosen


def _parse(arguments: list[str]) -> dict[str, str]:
    """Maps each option's long name to its value; nvidia-smi accepts both `--name value` and `--name=value`."""
    long_names = {"-L": "--list-gpus", "-i": "--id", "-q": "--query", "-h": "--help"}
    parsed: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        name = long_names.get(name, name)
        if not has_value and name in ("--id", "--format") and rest:
            value = rest.pop(0)
        parsed[name] = value
    return parsed


def answer(node: Node, arguments: list[str]) -> tuple[str, int]:
    """Returns what nvidia-smi prints for these arguments, and its exit code."""
    try:
        if arguments[:1] == ["topo"]:
            if arguments[1:2] not in (["-m"], ["--matrix"]):
                raise Refused(f"Maya does not emulate nvidia-smi topo {' '.join(arguments[1:])}; use topo -m.\n")
            return topology(node), 0
        options = _parse(arguments)
        chosen = _selected(node, options.pop("--id", None))
        formats = set(options.pop("--format", "").split(","))
        queries = {"--query-gpu": query, "--query-compute-apps": processes}
        for name, run in queries.items():
            if name in options:
                return run(node, [field.strip() for field in options[name].split(",")], formats, chosen), 0
        if "--list-gpus" in options:
            return listing(node, chosen), 0
        if options:
            raise Refused(
                f"Maya does not emulate the option {next(iter(options))}. It answers nvidia-smi without options, -L, -i, --query-gpu, --query-compute-apps and topo -m.\n"
            )
        return table(node, chosen), 0
    except Refused as refused:
        return str(refused), 2


def install(node: Node, patches: Patches, private: Path | None) -> None:
    folder = tempfile.mkdtemp(prefix="maya-smi-", dir=private or folder_for_sockets())
    address = os.path.join(folder, "socket")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            out, code = answer(node, json.loads(self.rfile.readline()))
            self.wfile.write(json.dumps({"out": out, "code": code}).encode())

    server = socketserver.UnixStreamServer(address, Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="maya-smi", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        shutil.rmtree(folder, ignore_errors=True)

    patches.on_undo(stop)
    script = Path(folder) / "nvidia-smi"
    script.write_text(CLIENT.format(python=sys.executable, path=address))
    script.chmod(0o755)
    patches.put(os.environ, "PATH", folder + os.pathsep + os.environ.get("PATH", os.defpath))
