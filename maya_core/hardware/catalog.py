"""The hardware catalog: GPUs, kinds of node, networks and prices, found by the names that people use for them.

The entries come from the TOML files in this folder and from the user's own file, which own_file.py reads.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from maya_core.errors import MayaError
from maya_core.hardware import own_file, toml
from maya_core.hardware.models import CatalogEntry, Gpu, Network, NodeType, Price, Source
from maya_core.hardware.own_file import key

__all__ = ["DEFAULT_GPU", "Catalog", "Gpu", "Network", "NodeType", "Price", "Source", "catalog", "default_node", "find_gpu",
           "find_network", "find_node", "gpus", "hardware_file", "hardware_file_in_use", "use_hardware_file"]  # fmt: skip

DEFAULT_GPU = "h100"
VARIABLE = "MAYA_HARDWARE"
PLAIN_NODE = "pcie-box"  # for GPUs without a known kind of node
Found = TypeVar("Found", bound=CatalogEntry)


@dataclass(frozen=True)
class Catalog:
    """All known hardware, each kind by name."""

    gpus: dict[str, Gpu]
    nodes: dict[str, NodeType]
    networks: dict[str, Network]
    prices: tuple[Price, ...]
    sources: dict[str, Source]


def hardware_file() -> Path | None:
    """The user's own file: the one that MAYA_HARDWARE names, otherwise $XDG_CONFIG_HOME/maya/hardware.toml if it exists."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().resolve()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    usual = config / "maya" / "hardware.toml"
    return usual.resolve() if usual.is_file() else None


def use_hardware_file(path: Path | None) -> None:
    """Makes this process and its children, in any folder, read this file; None selects the usual one."""
    if path is not None:
        os.environ[VARIABLE] = str(path.expanduser().resolve())
    elif (usual := hardware_file()) is not None:
        os.environ[VARIABLE] = str(usual)


@contextmanager
def hardware_file_in_use(path: Path | None) -> Iterator[None]:
    """Makes this process and its children read this file for a while; None changes nothing."""
    before = os.environ.get(VARIABLE)
    if path is not None:
        use_hardware_file(path)
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop(VARIABLE, None)
            os.environ.update({} if before is None else {VARIABLE: before})


def catalog() -> Catalog:
    """The catalog, including the user's own entries."""
    path = hardware_file()
    return _read(path, own_file.read(path) if path is not None else "")


@functools.cache
def _shipped() -> dict[str, Any]:
    folder = Path(__file__).parent
    read = {name: toml.loads((folder / f"{name}.toml").read_text()) for name in own_file.SECTIONS}
    sources = {source: entry for table in read.values() for source, entry in table["sources"].items()}
    return {name: table[name] for name, table in read.items()} | {"sources": sources}


@functools.lru_cache(maxsize=8)
def _read(path: Path | None, text: str) -> Catalog:
    """The catalog, including the entries in the file's text. It is read again only if the text has changed."""
    shipped, own = _shipped(), own_file.parse(path, text) if path is not None else {}

    def section(name: str, model: type[Found]) -> dict[str, Found]:
        table: own_file.Table = shipped[name]
        if path is not None:
            table = own_file.merge(path, name, table, own.get(name, {}))
        return {
            entry: own_file.validate(path, f"{name}.{entry}", model, {**fields, "name": entry})
            for entry, fields in table.items()
        }

    found = Catalog(
        gpus=section("gpus", Gpu),
        nodes=section("nodes", NodeType),
        networks=section("networks", Network),
        prices=tuple(
            own_file.validate(path, f"price {number}", Price, entry)
            for number, entry in enumerate([*own.get("prices", ()), *shipped["prices"]], 1)
        ),
        sources={name: Source(**entry) for name, entry in shipped["sources"].items()},
    )
    return _resolved(found, path)


def _resolved(read: Catalog, path: Path | None) -> Catalog:
    """Replaces aliases in references between entries by the names of the entries."""
    where = f"{own_file.shown(path)}: " if path is not None else ""

    def name(entries: dict[str, Found], given: str, of: str) -> str:
        if (entry := _by_name(entries, given)) is not None:
            return entry.name
        close = difflib.get_close_matches(key(given), _names(entries), n=1, cutoff=0.5)
        raise MayaError(f"{where}{of}: '{given}' is not known.", f"Did you mean '{close[0]}'?" if close else "")

    nodes = {
        node.name: node.model_copy(
            update={
                "gpu": name(read.gpus, node.gpu, f"nodes.{node.name}: gpu"),
                "network": name(read.networks, node.network, f"nodes.{node.name}: network"),
            }
        )
        for node in read.nodes.values()
    }
    prices = tuple(
        price.model_copy(
            update={
                "gpu": price.gpu and name(read.gpus, price.gpu, f"price {number}: gpu"),
                "node": price.node and name(read.nodes, price.node, f"price {number}: node"),
                "provider": key(price.provider),
            }
        )
        for number, price in enumerate(read.prices, 1)
    )
    return Catalog(read.gpus, nodes, read.networks, prices, read.sources)


def _names(entries: dict[str, Found]) -> dict[str, Found]:
    """Entries by their names and aliases; a name takes precedence over another entry's alias."""
    by_alias = {key(alias): entry for entry in entries.values() for alias in entry.aliases}
    return by_alias | entries


def _by_name(entries: dict[str, Found], name: str) -> Found | None:
    return _names(entries).get(key(name))


def _find(kind: str, entries: dict[str, Found], name: str, known: str) -> Found:
    if (entry := _by_name(entries, name)) is not None:
        return entry
    close = difflib.get_close_matches(key(name), _names(entries), n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise MayaError(f"unknown {kind} '{name}'.", f"{hint}{known}")


def gpus() -> dict[str, Gpu]:
    """Every GPU of the catalog by its name."""
    return catalog().gpus


def find_gpu(name: str) -> Gpu:
    """The GPU with this name or alias, in any capitalization."""
    return _find("GPU", gpus(), name, f"Known: {', '.join(gpus())}. `maya gpus` shows more about each.")


def find_node(name: str) -> NodeType:
    """The kind of node with this name or alias: 'hgx-h100', 'p5.48xlarge', 'Standard_ND96isr_H100_v5'."""
    return _find("node type", catalog().nodes, name, "`maya gpus --nodes` lists them.")


def find_network(name: str) -> Network:
    """The network with this name or alias: 'infiniband-ndr', 'ndr', 'efa-v3'."""
    networks = catalog().networks
    return _find("network", networks, name, f"Known: {', '.join(networks)}.")


def default_node(gpu: Gpu) -> NodeType:
    """The kind of node that is assumed for a GPU if none is named: the user's own before the catalog's."""
    nodes = sorted(catalog().nodes.values(), key=lambda node: not node.own)
    for name in (gpu.name, gpu.base):
        for node in nodes:
            if node.default and node.gpu == name:
                return node
    return catalog().nodes[PLAIN_NODE]
