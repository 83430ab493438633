"""A place of a program that read a value nobody knows, and what it decided with it: an entry of a rank trace."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

# All unknown masks keep nothing, or everything: the runs that bound memory.
Extreme = Literal["none", "all"]
EXTREMES: tuple[Extreme, ...] = ("none", "all")


class UnknownRead(BaseModel):
    """Reads of unknown values at one place of the program."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str  # the program's line
    library: str = ""  # the line of a library that read the value, if it was not the program itself
    how: Literal["mask", "distinct", "largest", "sum", "scalar"]
    use: Literal["size", "branch", "loop"]
    decides: str = ""  # the line that it decides, if it is another one
    reads: int
    kept: int = 0  # of a mask: elements that were kept; distinct ones; repeats; the largest number
    elements: int = 0  # of which
    number: float | None = None  # the last number that was read
    assumed: bool = False  # the user said what it is
    routed: bool = False  # it follows from the choices of a router, which are assumed to be spread evenly

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the place and the purpose, in all ranks and runs of the program."""
        return self.source, self.library, self.how, self.use, self.decides

    def with_reads_of(self, other: UnknownRead) -> UnknownRead:
        """The reads of two ranks at the same place."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("reads", "kept", "elements")}
        return self.model_copy(update=sums)

    @property
    def decides_memory(self) -> bool:
        """Whether a size depends on it, and nobody has said what it is."""
        return self.use == "size" and not self.assumed and not self.routed

    @property
    def is_bounded(self) -> bool:
        """Whether memory with none kept and with all kept are bounds of what it decides."""
        return self.how in ("mask", "distinct")
