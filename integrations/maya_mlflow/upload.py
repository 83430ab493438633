"""Starts the process that sends a draft, and waits for it for a limited time.

MLflow runs in a process of its own, because it takes seconds to import, retries an unreachable server for minutes, and has one active
run and tracking URI per process, which belong to the user. A process can be ended at any time.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from maya_core.errors import MayaError
from maya_core.installation import how_to_install
from maya_core.messages import say
from maya_mlflow.draft import ELSEWHERE, LOG, Draft, read, remove, without_password

WAIT_VARIABLE = "MAYA_MLFLOW_WAIT"
WAIT = 10.0  # seconds for a server's next answer
LOCAL_WAIT = 120.0  # for a database on this machine, which may have to be created first
ALL = 12  # times WAIT for all answers together
IMPORT = 60.0  # seconds for MLflow to start
SHOW_AFTER = 3.0  # seconds until progress is printed
MORE_OFTEN = 5.0

# Variables of the sending process. It must not continue the user's own run, and metrics of this machine do not belong to the run.
QUIET = {
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_RECORD_ENV_VARS_IN_MODEL_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
NOT_OURS = ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT", "MLFLOW_PARENT_RUN_ID", "MAYA_PAIR_ID", "MAYA_FINGERPRINT")


@dataclass(frozen=True)
class Sent:
    run_id: str
    experiment_id: str
    uri: str

    @property
    def address(self) -> str:
        """Where the run can be viewed."""
        if self.uri.startswith(("http://", "https://")):
            return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"
        return f"run {self.run_id} in {self.uri}"


def require_mlflow() -> None:
    if find_spec("mlflow") is None:
        raise MayaError("MLflow is not installed.", f"Run: {how_to_install('mlflow')}")


@dataclass(frozen=True)
class Where:
    """Where a run is sent; None means MLflow's own configuration."""

    tracking_uri: str | None
    experiment: str | None
    experiment_id: str | None = None


def configured(uri: str | None = None, experiment: str | None = None) -> Where:
    """Where the user's own MLflow logs to, as far as this process knows. Settings in code come before the environment."""
    mlflow: Any = sys.modules.get("mlflow")
    experiment_id = None
    if mlflow is not None and hasattr(mlflow, "get_tracking_uri"):
        if uri is None and mlflow.is_tracking_uri_set():
            uri = mlflow.get_tracking_uri()
        if experiment is None and uri in (None, mlflow.get_tracking_uri()):  # an id is only valid on its server
            experiment_id = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_experiment_id", None)
    return Where(uri or os.environ.get("MLFLOW_TRACKING_URI"), experiment, experiment_id)


def upload_or_keep(draft: Draft, folder: Path) -> Sent | None:
    """Sends the folder. If that fails, it is kept, and a message explains how to send it later."""
    try:
        sent = upload(folder, draft.tracking_uri)
    except MayaError as error:
        where = f" to {without_password(draft.tracking_uri)}" if draft.tracking_uri else ""
        say(f"the {draft.kind} run was not logged{where}: {error.problem}")
        say(f"the run is stored and can be sent later with:  maya mlflow upload {folder}")
        return None
    return sent


def upload(folder: Path, uri: str | None = None) -> Sent:
    """Sends a folder, and removes it when everything has arrived."""
    draft = read(folder)
    elsewhere = uri is not None and without_password(uri) != draft.tracking_uri
    own = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:  # a draft does not contain the password, so the present setting is used
        uri = own if own is not None and without_password(own) == draft.tracking_uri else draft.tracking_uri
    local = uri is None or not uri.startswith(("http", "databricks"))
    wait = _wait(LOCAL_WAIT if local else WAIT)
    environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS} | QUIET
    if uri is not None:
        environment["MLFLOW_TRACKING_URI"] = uri
    environment.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{wait:.0f}")
    environment.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with (folder / LOG).open("w") as log:
        command = [sys.executable, "-m", "maya_mlflow.send", str(folder), *([ELSEWHERE] if elsewhere else [])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            result = _follow(child, wait)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    sent = Sent(str(result["done"]), str(result["experiment"]), str(result["uri"]))
    remove(folder)
    return sent


def _wait(default: float) -> float:
    text = os.environ.get(WAIT_VARIABLE)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise MayaError(
            f"{WAIT_VARIABLE}={text} is not a number of seconds.",
            f"Set it to a number such as {WAIT:.0f}, or unset it.",
        )
    return seconds


def _follow(child: subprocess.Popen[str], wait: float) -> dict[str, object]:
    """Reads the child's messages until it is done. Raises a MayaError with the reason if it fails or takes too long."""
    assert child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True).start()
    started = last = shown = time.monotonic()
    ready, files = False, 0
    while True:
        until = min(last + (wait if ready else IMPORT), started + IMPORT + ALL * wait)
        now = time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(until - now, MORE_OFTEN)))
        except queue.Empty:
            now = time.monotonic()
            if now >= until:
                if not ready:
                    raise MayaError(f"MLflow did not start within {IMPORT:.0f} s.") from None
                limit = f"no answer for {wait:g} s" if now - last >= wait else f"not done after {now - started:.0f} s"
                raise MayaError(f"{limit} ({WAIT_VARIABLE} sets another limit).") from None
            line = ""
        if line is None:
            raise MayaError("the sending process ended without a message.")
        message = json.loads(line) if line.startswith("{") else {}
        if "error" in message:
            raise MayaError(str(message["error"]))
        if "done" in message:
            return dict(message)
        if message:
            last = time.monotonic()
        ready, files = ready or "ready" in message, files + ("file" in message)
        if "was skipped" in str(message.get("file", "")):
            say(str(message["file"]))
        now = time.monotonic()
        if now - started > SHOW_AFTER and now - shown >= MORE_OFTEN:
            shown = now
            say(f"sending to MLflow, {now - started:.0f} s: " + (f"{files} files sent" if ready else "starting"))


def _pass_on(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
