"""The messages between an emulated process and the coordinator of its job, and the answers to them.

A message is a dataclass. Its class says what the answer is: `Message[bytes]` is answered by bytes, and a `Notice` by nothing, so the sender
does not wait. `Coordinator` has one handler for each class of this table, and `Link` sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from maya_core.errors import MayaError

AnswerT = TypeVar("AnswerT")


class Message(Generic[AnswerT]):
    """Something that the sender waits to have answered."""


class Notice(Message[None]):
    """Something that the sender does not wait for."""


@dataclass(frozen=True)
class Hello:
    """The first thing on every connection: which process and thread it is of. The main connection lives as long as its process, which the
    job waits for if it was `expected`."""

    process: int
    thread: int
    main: bool
    expected: bool = True


# ---- the life of a process ----


@dataclass(frozen=True)
class Joined(Message[None]):
    """This process is that rank."""

    rank: int


@dataclass(frozen=True)
class StepDone(Notice):
    """This process has finished so many steps."""

    step: int


@dataclass(frozen=True)
class Idle(Notice):
    """This process only waits for its own children, from now on or no longer."""

    idle: bool


# ---- starting ranks ----


@dataclass(frozen=True)
class WorldSize(Message[None]):
    """This process starts the ranks of a job of this size."""

    size: int


@dataclass(frozen=True)
class FirstJob(Message[bool]):
    """Asks whether no ranks were started yet."""


@dataclass(frozen=True)
class NextRank(Message[tuple[int | None, bool]]):
    """Asks for a rank to start, if fewer than `limit` processes are working. The answer is the rank or None, and whether any are left
    to start later."""

    limit: int


@dataclass(frozen=True)
class RankEnded(Message[None]):
    """The process of that rank has ended, with this exit code."""

    rank: int
    code: int


@dataclass(frozen=True)
class StartNoMore(Message[None]):
    """No further ranks are to be started."""


@dataclass(frozen=True)
class Needs(Message[None]):
    """This process will exchange messages with that rank, so it has to be emulated."""

    rank: int


# ---- values that ranks exchange ----


@dataclass(frozen=True)
class Post(Notice):
    """A value for another rank, under a key that both know."""

    key: str
    payload: bytes


@dataclass(frozen=True)
class Want(Message[bytes]):
    """Waits for the value under a key, which that rank posts. `why` names the operation, in case nobody does."""

    key: str
    rank: int
    why: str


# ---- the keys of torch.distributed's stores ----


@dataclass(frozen=True)
class GetKey(Message[bytes]):
    """Waits until the key has a value."""

    key: str


@dataclass(frozen=True)
class HasKey(Message[bool]):
    key: str


@dataclass(frozen=True)
class SetKey(Message[None]):
    key: str
    value: bytes


@dataclass(frozen=True)
class AddToKey(Message[int]):
    key: str
    amount: int


@dataclass(frozen=True)
class AppendToKey(Message[None]):
    key: str
    value: bytes


@dataclass(frozen=True)
class CompareSetKey(Message[bytes]):
    key: str
    expected: bytes
    desired: bytes


@dataclass(frozen=True)
class DeleteKey(Message[bool]):
    key: str


@dataclass(frozen=True)
class CountKeys(Message[int]):
    prefix: str


# ---- answers ----


@dataclass(frozen=True)
class Answer(Generic[AnswerT]):
    value: AnswerT


@dataclass(frozen=True)
class Hangs:
    """What the sender waits for cannot come any more: its rank would wait for ever."""

    why: str


@dataclass(frozen=True)
class Failed:
    """The coordinator itself failed on a message. That is a bug, and says nothing about the user's job."""

    error: str
    traceback: str

    def as_error(self) -> MayaError:
        return MayaError(
            f"Maya's coordinator failed: {self.error}.",
            f"This is a bug of Maya's, not of your program. Please report it with these lines:\n{self.traceback}",
        )


Reply = Answer[AnswerT] | Hangs | Failed
