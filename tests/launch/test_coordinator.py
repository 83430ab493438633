"""The coordinator and the links of a job's processes, without any emulation: each rank is a forked process with a few lines of its own."""

from __future__ import annotations

import multiprocessing
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest

from maya_core.errors import MayaError
from maya_core.launch import protocol
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.link import Link, WouldHang

fork = multiprocessing.get_context("fork")


def _serve(body: Callable[[Link], Any], socket: Path, chosen: frozenset[int], answers: Queue[Any]) -> None:
    link = Link(socket, chosen)
    try:
        answers.put(("returned", body(link)))
    except WouldHang as hang:
        answers.put(("hangs", hang.why))
    except MayaError as error:
        answers.put(("failed", str(error)))
    link.close()


class Rank:
    """A process with a link, which runs one function."""

    def __init__(
        self, coordinator: Coordinator, body: Callable[[Link], Any], chosen: frozenset[int] = frozenset()
    ) -> None:
        self._answers = fork.Queue()
        self._process = fork.Process(target=_serve, args=(body, coordinator.socket, chosen, self._answers))
        self._process.start()

    def answer(self) -> tuple[str, Any]:
        found: tuple[str, Any] = self._answers.get(timeout=60)
        self._process.join(timeout=60)
        return found


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator() as made:
        yield made


@contextmanager
def launcher(coordinator: Coordinator) -> Iterator[Link]:
    """The process that starts ranks: this one."""
    link = Link(coordinator.socket, frozenset())
    link.idle(True)
    try:
        yield link
    finally:
        link.close()


def test_every_message_of_the_protocol_has_a_handler(coordinator: Coordinator) -> None:
    messages = {
        each
        for each in vars(protocol).values()
        if isinstance(each, type)
        and issubclass(each, protocol.Message)
        and each not in (protocol.Message, protocol.Notice)
    }
    assert len(messages) == 19
    assert set(coordinator._handlers) == messages


def test_notices_are_not_answered_and_messages_declare_their_answers() -> None:
    assert issubclass(protocol.Post, protocol.Notice) and not issubclass(protocol.Want, protocol.Notice)
    [base] = typing.cast(Any, protocol.Want).__orig_bases__
    assert typing.get_args(base) == (bytes,)


def test_a_value_travels_from_one_rank_to_another(coordinator: Coordinator) -> None:
    with launcher(coordinator) as link:
        link.world(2)
        assert link.next_rank(8) == (0, True)

        def wants(link: Link) -> bytes:
            link.rank(0)
            return link.want("greeting", 1, "a test")

        def posts(link: Link) -> None:
            link.rank(1)
            link.post("greeting", b"hello")
            link.meet(0)  # answered, so the post has arrived

        first = Rank(coordinator, wants)
        while (found := link.next_rank(8))[0] is None:  # rank 0 needs rank 1 before it can continue
            pass
        assert found[0] == 1
        second = Rank(coordinator, posts)
        assert first.answer() == ("returned", b"hello")
        assert second.answer() == ("returned", None)
        for rank in (0, 1):
            link.ended(rank, 0)
        assert link.next_rank(8) == (None, False)


def test_store_keys(coordinator: Coordinator) -> None:
    def uses(link: Link) -> list[Any]:
        link.set("a", b"1")
        link.append("a", b"2")
        return [
            link.get("a"),
            link.known("a"),
            link.known("b"),
            link.add("n", 3),
            link.add("n", 0),
            link.compare_set("a", b"12", b"x"),
            link.count("a"),
            link.delete("a"),
            link.known("a"),
        ]

    assert Rank(coordinator, uses).answer() == ("returned", [b"12", True, False, 3, 3, b"x", 1, True, False])


def test_a_rank_that_waits_for_ever_is_told_why(coordinator: Coordinator) -> None:
    def waits(link: Link) -> bytes:
        link.rank(0)
        return link.get("never set")

    assert Rank(coordinator, waits).answer() == ("hangs", "rank 0 waits for the store key 'never set'")


def test_a_rank_that_waits_for_one_that_has_ended_is_told_so(coordinator: Coordinator) -> None:
    with launcher(coordinator) as link:
        link.idle(False)  # somebody is still working, so the job as a whole is not stuck
        link.world(2)
        assert link.next_rank(8)[0] == 0

        def waits(link: Link) -> bytes:
            link.rank(0)
            return link.want("late", 1, "a broadcast")

        first = Rank(coordinator, waits)
        while (found := link.next_rank(8))[0] is None:
            pass
        link.ended(found[0], 1)  # it was started, and died before it connected
        assert first.answer() == ("hangs", "rank 0 waits for data from rank 1 in a broadcast, which has ended")


def test_two_ranks_that_wait_for_each_other_hang(coordinator: Coordinator) -> None:
    with launcher(coordinator) as link:
        link.world(2)

        def waits_for(other: int) -> Callable[[Link], bytes]:
            def body(link: Link) -> bytes:
                link.rank(1 - other)
                return link.want(f"from {other}", other, "a receive")

            return body

        assert link.next_rank(8)[0] == 0
        first = Rank(coordinator, waits_for(1))
        while link.next_rank(8)[0] is None:
            pass
        second = Rank(coordinator, waits_for(0))
        answers = [first.answer(), second.answer()]
        assert [kind for kind, _ in answers] == ["hangs", "hangs"]
        assert (
            "rank 0 waits for data from rank 1" in answers[0][1]
            and "rank 1 waits for data from rank 0" in answers[0][1]
        )


def test_a_failing_handler_is_reported_as_itself_and_not_as_a_hang(coordinator: Coordinator) -> None:
    def breaks(sender: Any, message: Any) -> None:
        raise ZeroDivisionError("broken on purpose")

    coordinator._handlers[protocol.SetKey] = breaks

    def sets(link: Link) -> None:
        link.set("a", b"1")

    kind, text = Rank(coordinator, sets).answer()
    assert kind == "failed"
    assert "Maya's coordinator failed: ZeroDivisionError: broken on purpose" in text and "bug of Maya's" in text

    def still_served(link: Link) -> bool:
        return link.known("a")

    assert Rank(coordinator, still_served).answer() == ("returned", False)


def test_a_failing_notice_reaches_everybody_and_the_command() -> None:
    def breaks(sender: Any, message: Any) -> None:
        raise KeyError("lost")

    coordinator = Coordinator()
    coordinator.__enter__()
    coordinator._handlers[protocol.StepDone] = breaks

    def steps(link: Link) -> int:
        link.step(1)
        return link.count("")  # the next answer brings the failure

    kind, text = Rank(coordinator, steps).answer()
    assert (kind, "KeyError" in text) == ("failed", True)
    with pytest.raises(MayaError, match="coordinator failed: KeyError: 'lost'"):
        coordinator.__exit__(None)


def test_only_chosen_ranks_are_started() -> None:
    with Coordinator(ranks=(0, 5)) as coordinator, launcher(coordinator) as link:
        link.world(8)
        link.meet(3)  # the user has chosen others
        assert [link.next_rank(8)[0] for _ in range(3)] == [0, 5, None]
        link.start_no_more()
        assert link.next_rank(8) == (None, False)
