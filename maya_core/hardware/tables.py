"""The output of `maya gpus`: the catalog as tables for people and as JSON for machines."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from maya_core.hardware.catalog import Gpu, NodeType, catalog
from maya_core.hardware.cluster import Quote, gpu_hour_quotes
from maya_core.hardware.models import GPU_FIELDS, CatalogEntry

WIDE, WIDEST = 120, 150  # terminal widths from which tables show more, and everything


def size(value: float) -> str:
    for unit, bytes_of in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if value >= bytes_of:
            return f"{value / bytes_of:.4g} {unit}"
    return f"{value / 2**10:.4g} KiB"


def rate(value: float) -> str:
    return f"{value / 1e12:.3g} TB/s" if value >= 1e12 else f"{value / 1e9:.4g} GB/s"


def gpu_table(width: int) -> Table:
    """A table with a line for each GPU. In narrow terminals, units move into the headings."""
    wide = width >= WIDE
    table = _table()
    table.add_column("GPU", no_wrap=True)
    if wide:
        table.add_column("device", min_width=24)
    numbers = (
        ("memory", "bandwidth", "TFLOP/s", "W", "NVLink") if wide else ("GiB", "TB/s", "TFLOP/s", "W", "NVLink GB/s")
    )
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("$ per GPU-hour" if wide else "$/GPU-hour", no_wrap=True)
    if width >= WIDEST:
        table.add_column("also called", style="dim")
    for gpu in catalog().gpus.values():
        quotes = gpu_hour_quotes(gpu)
        memory, bandwidth = gpu.memory_bytes / 2**30, gpu.memory_bandwidth_bytes_per_s
        nvlink = f"{gpu.nvlink_bytes_per_s / 1e9:.4g}" if gpu.nvlink_bytes_per_s else ""
        row = [
            f"{memory:.1f} GiB" if wide else f"{memory:.1f}",
            rate(bandwidth) if wide else f"{bandwidth / 1e12:.2f}",
            f"{gpu.training_peak / 1e12:.0f}",
            f"{gpu.power_limit_w:g}",
            f"{nvlink} GB/s" if wide and nvlink else nvlink,
            _quote(quotes[0], date=wide) if quotes else "",
        ]
        if wide:
            row = [gpu.driver_name, *row]
        if width >= WIDEST:
            row.append(", ".join(gpu.aliases))
        table.add_row(_name(gpu), *row)
    table.caption = _caption(
        "Dense bfloat16 (float16 before Ampere). NVLink: one direction. Prices: on-demand lists, the cheapest known."
    )
    return table


def node_table(width: int, gpu: str | None = None) -> Table:
    """A table with a line for each kind of node, or for those with the given GPU."""
    wide = width >= WIDEST
    table = _table()
    for heading in ("node", "GPUs", "inside", "network" if wide else "Gb/s"):
        table.add_column(heading, no_wrap=True)
    for heading in ("vCPUs", "RAM") if wide else ():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("$ an hour" if wide else "$/hour", no_wrap=True, justify="left" if wide else "right")
    for node in catalog().nodes.values():
        if gpu is not None and node.gpu != gpu:
            continue
        prices = [price for price in catalog().prices if price.node == node.name]
        row = [f"{node.gpus_per_node} x {node.gpu}", _inside(node, wide), _ports(node, wide)]
        if wide:
            row += [str(node.vcpus), size(node.ram_bytes)]
        texts = [f"{price.usd_per_hour:.2f}" + (f" {price.provider} {price.date}" if wide else "") for price in prices]
        table.add_row(_name(node), *row, "\n".join(texts))
    table.caption = _caption(
        "NVSwitch/72: the NVLink domain is larger than the node. NVLS: the switches reduce. `maya gpus --networks` lists the networks."
    )
    return table


def network_table() -> Table:
    """A table with a line for each network."""
    table = _table()
    table.add_column("network", no_wrap=True)
    table.add_column("")
    for heading in ("port", "latency", "reached"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("RDMA")
    for network in catalog().networks.values():
        table.add_row(
            _name(network),
            network.description,
            f"{_gigabits(network.bytes_per_s)} Gb/s",
            f"{network.latency_s * 1e6:g} us",
            f"{network.efficiency:.0%}",
            "yes" if network.rdma else "no",
        )
    table.caption = _caption(
        "A port in one direction. Latency and share reached: of NCCL, typical, not measured on yours."
    )
    return table


def gpu_page(gpu: Gpu, width: int) -> Group:
    """All that is known about one GPU, with sources, the nodes that have it and its prices."""
    facts = _table()
    facts.show_header = False
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    facts.add_column(style="dim")
    facts.add_row("device", f"{gpu.driver_name}, {gpu.architecture}, compute capability {_capability(gpu)}", "")
    if gpu.aliases:
        facts.add_row("also called", ", ".join(gpu.aliases), "")
    for label, group, text in _facts(gpu):
        facts.add_row(label, text, _sources(gpu, group))
    parts: list[Any] = [Text(gpu.name, style="bold"), facts]
    if gpu.base is not None:
        parts[0] += Text(f", derived from {gpu.base}", style="dim")
    if any(node.gpu == gpu.name for node in catalog().nodes.values()):
        parts += [Text("\nNodes", style="bold"), node_table(width, gpu.name)]
    if quotes := gpu_hour_quotes(gpu):
        parts += [Text("\nPrices, $ per GPU-hour", style="bold"), _price_table(quotes)]
    used = [source for ids in gpu.sources.values() for source in ids] + [quote.price.source for quote in quotes]
    sources = Table.grid(padding=(0, 2))
    for name in dict.fromkeys(filter(None, used)):
        sources.add_row(f" {name}", _cite(name), style="dim")
    if sources.row_count:
        parts += [Text("\nSources", style="bold"), sources]
    return Group(*parts)


def _facts(gpu: Gpu) -> list[tuple[str, str, str]]:
    """Rows of a GPU's page: label, group of fields, text."""
    peaks = ", ".join(f"{dtype} {value / 1e12:g}" for dtype, value in gpu.peak_flops.items())
    clocks = f"{gpu.boost_clock_mhz:g} MHz boost" + (f", {gpu.base_clock_mhz:g} base" if gpu.base_clock_mhz else "")
    nvlink = (
        f"NVLink {gpu.nvlink_generation}, {gpu.nvlink_links} links, {rate(gpu.nvlink_bytes_per_s)} one direction"
        if gpu.nvlink_bytes_per_s
        else "no NVLink"
    )
    pcie = f"PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}, host {rate(gpu.host_link_bytes_per_s)} one direction"
    limit = "" if gpu.power_limit_w == gpu.tdp_w else f", limited to {gpu.power_limit_w:g} W"
    return [
        ("TFLOP/s, dense", "peaks", peaks),
        ("memory", "memory_size", f"{size(gpu.memory_bytes)} for a program"),
        ("", "outside", f"{size(gpu.outside_bytes)} of it for the CUDA context"),
        (
            "",
            "memory",
            f"{gpu.memory_kind}, {rate(gpu.memory_bandwidth_bytes_per_s)}, {gpu.memory_bus_bits} bits at {gpu.memory_clock_mhz:g} MHz",
        ),
        ("chip", "chip", f"{gpu.sms} SMs, L2 {size(gpu.l2_bytes)}, {clocks}"),
        (
            "limits",
            "limits",
            f"{gpu.max_threads_per_sm} threads per SM, {size(gpu.shared_memory_per_block_bytes)} shared memory per block",
        ),
        ("power", "power", f"{gpu.tdp_w:g} W{limit}"),
        ("links", "links", f"{nvlink}; {pcie}"),
        ("copy engines", "copy_engines", str(gpu.copy_engines)),
    ]


def as_json(what: str, gpu: Gpu | None = None) -> dict[str, Any]:
    """The catalog, or one GPU with its nodes and prices, as plain data. Units are in the names."""
    known = catalog()
    if what == "nodes":
        return {name: node.model_dump() for name, node in known.nodes.items()}
    if what == "networks":
        return {name: network.model_dump() for name, network in known.networks.items()}
    if gpu is None:
        return {name: _gpu_json(each) for name, each in known.gpus.items()}
    ids = {source for group in gpu.sources.values() for source in group}
    return {
        **_gpu_json(gpu),
        "nodes": [node.model_dump() for node in known.nodes.values() if node.gpu == gpu.name],
        "source_list": {name: known.sources[name].model_dump() for name in sorted(ids)},
    }


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    quotes = [
        {"usd_per_gpu_hour": round(quote.usd_per_hour, 4), **quote.price.model_dump(exclude={"usd_per_hour", "gpu"})}
        for quote in gpu_hour_quotes(gpu)
    ]
    return {**gpu.model_dump(), "prices": quotes}


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")


def _caption(text: str) -> str:
    own = any(
        entry.own for entries in (catalog().gpus, catalog().nodes, catalog().networks) for entry in entries.values()
    )
    return f"{text} * from your own file." if own else text


def _name(entry: CatalogEntry) -> Text:
    return Text(entry.name, style="bold") + Text(" *" if entry.own else "", style="yellow")


def _inside(node: NodeType, wide: bool) -> str:
    names = {"nvswitch": "NVSwitch", "mesh": "mesh", "pairs": "pairs", "pcie": "PCIe"}
    beyond = f"/{node.nvlink_domain}" if node.nvlink_domain > node.gpus_per_node else ""
    return f"{names[node.topology]}{beyond}{' NVLS' if node.nvls and wide else ''}"


def _ports(node: NodeType, wide: bool) -> str:
    port = node.nic_bytes_per_s or catalog().networks[node.network].bytes_per_s
    return f"{node.nics} x {_gigabits(port)}{f' Gb/s {node.network}' if wide else ''}"


def _gigabits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:g}"


def _capability(gpu: Gpu) -> str:
    return ".".join(str(part) for part in gpu.compute_capability)


def _sources(gpu: Gpu, group: str) -> str:
    mine = [field for field in GPU_FIELDS[group] if field in gpu.own]
    given = ", ".join(gpu.sources.get(group, ()))
    return ", ".join(part for part in (f"your file ({', '.join(mine)})" if mine else "", given) if part)


def _cite(name: str) -> str:
    source = catalog().sources[name]
    return f"{source.title}. {source.publisher}, {source.year}"


def _quote(quote: Quote, date: bool) -> str:
    return f"{quote.usd_per_hour:.2f} {quote.price.provider}{f' {quote.price.date}' if date else ''}"


def _price_table(quotes: list[Quote]) -> Table:
    table = _table()
    table.show_header = False
    for quote in quotes:
        price = quote.price
        table.add_row(
            f"{quote.usd_per_hour:.2f}", price.provider, price.node or "by the GPU", price.region, price.date, price.source or "your file",
        )  # fmt: skip
    return table
