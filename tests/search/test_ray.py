"""Trials on a real Ray cluster that the test starts. One of its workers is killed during the search."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from search_here import job, search

from maya_core.search.executors import LocalExecutor, RayExecutor

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    os.environ.update(RAY_DISABLE_IMPORT_WARNING="1", RAY_USAGE_STATS_ENABLED="0")
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    address = str(context.address_info["address"])
    ray.shutdown  # noqa: B018  (the cluster lives on; the executor joins it from this process)
    yield address
    ray.shutdown()


def workers() -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process().children(recursive=True)
        if "ray::guarded" in one.name() or "ray::guarded" in " ".join(one.cmdline())
    ]


def a_busy_worker() -> psutil.Process | None:
    """A worker that runs a trial now. On a busy machine it takes a moment until the next trial has begun."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for one in workers():
            return one
        time.sleep(0.05)
    return None


def test_no_trial_is_lost_or_counted_twice_when_a_worker_dies(cluster: str, tmp_path: Path) -> None:
    recipe = job(tmp_path)
    here = search(recipe, tmp_path / "here", sampler="random")
    executor = LocalExecutor(2)
    here.run(5, executor)
    executor.close()
    there = search(recipe, tmp_path / "there", sampler="random")
    remote = RayExecutor(cluster, None)
    assert remote.workers == 2
    killed: list[int] = []
    original = remote.outcomes

    def outcomes(tasks: dict[int, Any]) -> Iterator[tuple[int, Any]]:
        for found in original(tasks):
            if not killed and there.trials:
                worker = a_busy_worker()
                assert worker is not None
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)
            yield found

    remote.outcomes = outcomes  # type: ignore[method-assign]
    there.run(5, remote)
    assert killed
    assert [(one.number, one.point, one.outcome.step_time_s) for one in there.trials] == [
        (one.number, one.point, one.outcome.step_time_s) for one in here.trials
    ]
