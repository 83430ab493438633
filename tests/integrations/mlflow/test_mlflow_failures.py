"""MLflow servers that are down, slow, refuse or die in between: the run is stored completely, the program continues, and the run can be sent later, once."""

from __future__ import annotations

import base64
import http.client
import http.server
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlparse

import pytest
from maya_mlflow import draft as drafts
from maya_mlflow import keys
from maya_mlflow.commands import add
from maya_mlflow.draft import Draft
from maya_mlflow.upload import WAIT_VARIABLE, configured, upload_or_keep
from mlflow_here import free_port
from packaging.version import Version
from typer.testing import CliRunner

from maya_core import cli
from maya_core.errors import MayaError

add(cli.app, cli.calibrate.app)
runner = CliRunner()
EXPERIMENT = "failures"


def kept(uri: str, name: str = "one") -> tuple[Draft, Path]:
    """A run on disk, with a few artifacts."""
    draft = Draft(
        kind="predicted",
        name=name,
        tracking_uri=uri,
        experiment=EXPERIMENT,
        metrics={keys.STEP_TIME: 0.5, keys.PEAK_ALLOCATED: 100.0},
        params={"maya/gpu": "h100"},
        tags={keys.KIND: "predicted", keys.PAIR: name},
    )
    folder = drafts.new_folder(draft)
    for number in range(3):
        (folder / drafts.ARTIFACTS / f"file-{number}.txt").write_text("x" * 1000)
    drafts.write(draft, folder)
    return draft, folder


def runs(uri: str, name: str) -> list[object]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return []
    return list(client.search_runs([experiment.experiment_id], filter_string=f"tags.`{keys.PAIR}` = '{name}'"))


class Forward(http.server.BaseHTTPRequestHandler):
    """Passes requests on to a real server; after so many of them it hangs up."""

    target, left = "", 0
    protocol_version = "HTTP/1.0"

    def _pass_on(self) -> None:
        kind = type(self)
        kind.left -= 1
        if kind.left < 0:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        there = urlparse(kind.target)
        connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        connection.request(self.command, self.path, body, headers | {"Host": there.netloc})
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _pass_on

    def log_message(self, format: str, *args: object) -> None:
        pass


class Refuse(Forward):
    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_error(401, "You are not authenticated")

    do_GET = do_POST = do_PUT = _refuse


@contextmanager
def serving(kind: type[Forward]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as here:
        threading.Thread(target=here.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{here.server_address[1]}"
        here.shutdown()


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(WAIT_VARIABLE, "5")
    return tmp_path


def test_a_server_that_is_down_costs_seconds_and_the_run_is_sent_later_once(
    uri: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    draft, folder = kept(down, "down")
    assert upload_or_keep(draft, folder) is None
    said = " ".join(capfd.readouterr().err.split())
    # MLflow by itself would try for minutes; then the limit would be reported instead of the server's answer.
    assert f"the predicted run was not logged to {down}: " in said and "Connection refused" in said
    assert f"the run is stored and can be sent later with: maya mlflow upload {folder}" in said
    copy = here / "copy"
    shutil.copytree(folder, copy)
    for again in (folder, copy):
        result = runner.invoke(cli.app, ["mlflow", "upload", str(again), "--tracking-uri", uri])
        assert result.exit_code == 0, result.exception
        assert "is uploaded" in result.output and not again.exists()
    (run,) = runs(uri, "down")
    assert run.info.status == "FINISHED" and run.data.metrics[keys.STEP_TIME] == 0.5  # type: ignore[attr-defined]


def test_a_server_that_does_not_answer_is_not_waited_for(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WAIT_VARIABLE, "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "500")  # of the user's own: it is not waited for all the same
    with socket.create_server(("127.0.0.1", 0)) as silent:
        draft, folder = kept(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert upload_or_keep(draft, folder) is None
    said = " ".join(capfd.readouterr().err.split())
    assert "no answer for 2 s (MAYA_MLFLOW_WAIT sets another limit)" in said
    assert drafts.read(folder) == draft and len(list((folder / drafts.ARTIFACTS).iterdir())) == 3


def test_a_server_that_refuses_is_quoted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Refuse) as refusing:
        draft, folder = kept(refusing.replace("http://", "http://me:secret@"))
        assert upload_or_keep(draft, folder) is None
    said = " ".join(capfd.readouterr().err.split())
    assert "401" in said and "maya mlflow upload" in said
    assert "secret" not in said and "secret" not in (folder / drafts.RUN).read_text()


def test_an_experiments_id_is_of_its_own_server(uri: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, folder = kept(f"http://127.0.0.1:{free_port()}", "moved")
    drafts.write(draft.model_copy(update={"experiment_id": "123456"}), folder)
    result = runner.invoke(cli.app, ["mlflow", "upload", str(folder), "--tracking-uri", uri])
    assert result.exit_code == 0, result.exception
    assert len(runs(uri, "moved")) == 1
    monkeypatch.setattr("mlflow.tracking.fluent._active_experiment_id", "7")
    assert configured().experiment_id == "7" and configured("http://another").experiment_id is None


class NeedsPassword(Forward):
    def _pass_on(self) -> None:
        if self.headers.get("Authorization") != f"Basic {base64.b64encode(b'me:secret').decode()}":
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_error(401, "You are not authenticated")
        else:
            super()._pass_on()

    do_GET = do_POST = do_PUT = _pass_on


def test_a_password_that_is_set_is_used_for_what_was_kept(
    uri: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forward, "target", uri)
    monkeypatch.setattr(Forward, "left", 1000)
    with serving(NeedsPassword) as server:
        _, folder = kept(server.replace("http://", "http://me:secret@"), "password")
        assert "secret" not in (folder / drafts.RUN).read_text()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.replace("http://", "http://me:secret@"))
        result = runner.invoke(cli.app, ["mlflow", "upload", str(folder)])
        assert result.exit_code == 0, result.exception
    assert len(runs(uri, "password")) == 1


def test_a_server_that_dies_in_the_middle_gets_the_rest_later_into_the_same_run(
    uri: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    MlflowClient(uri).create_experiment("warm")  # the server has imported what it needs
    monkeypatch.setattr(Forward, "target", uri)
    monkeypatch.setattr(Forward, "left", 7)  # the experiment, a search, the run, its figures, and some of the files
    with serving(Forward) as dying:
        draft, folder = kept(dying, "dies")
        assert upload_or_keep(draft, folder) is None
    assert "maya mlflow upload" in capfd.readouterr().err
    (half,) = runs(uri, "dies")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # before MLflow 3.8, the client looks for artifacts there
    there = MlflowClient(uri).list_artifacts(half.info.run_id)  # type: ignore[attr-defined]
    assert half.info.status == "RUNNING" and len(there) < 3  # type: ignore[attr-defined]
    result = runner.invoke(cli.app, ["mlflow", "upload", str(folder), "--tracking-uri", uri])
    assert result.exit_code == 0, result.exception
    (whole,) = runs(uri, "dies")
    assert whole.info.run_id == half.info.run_id and whole.info.status == "FINISHED"  # type: ignore[attr-defined]
    assert len(MlflowClient(uri).list_artifacts(whole.info.run_id)) == 3  # type: ignore[attr-defined]
    assert len(MlflowClient(uri).get_metric_history(whole.info.run_id, keys.STEP_TIME)) == 1  # type: ignore[attr-defined]


def test_a_run_of_the_users_is_neither_resumed_nor_ended(uri: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.create_experiment("mine")
    mine = client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", mine)  # as a launcher leaves it to what it starts
    draft, folder = kept(uri, "beside")
    sent = upload_or_keep(draft, folder)
    assert sent is not None and sent.run_id != mine
    asked = draft.model_copy(update={"run_id": mine, "upload_id": "into"})
    folder = drafts.new_folder(asked)
    drafts.write(asked, folder)
    sent = upload_or_keep(asked, folder)
    assert sent is not None and sent.run_id == mine
    run = client.get_run(mine)
    assert run.info.status == "RUNNING" and run.data.metrics[keys.STEP_TIME] == 0.5


def test_without_any_configuration_runs_go_to_mlflows_own_place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv(WAIT_VARIABLE)
    draft, folder = kept("", "local")
    draft = draft.model_copy(update={"tracking_uri": configured().tracking_uri})
    drafts.write(draft, folder)
    assert draft.tracking_uri is None
    sent = upload_or_keep(draft, folder)
    place = "mlflow.db" if Version(version("mlflow")) >= Version("3.8") else "mlruns"  # MLflow's own default
    assert sent is not None and (here / place).exists() and sent.uri.endswith(f"{here}/{place}")
    assert MlflowClient(sent.uri).get_run(sent.run_id).data.params["maya/gpu"] == "h100"


def test_what_cannot_be_uploaded_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.invoke(cli.app, ["mlflow", "upload", "nowhere"])
    assert (
        isinstance(result.exception, MayaError)
        and "nowhere does not contain a run to upload" in result.exception.problem
    )
    _, folder = kept("http://127.0.0.1:9")
    monkeypatch.setenv(WAIT_VARIABLE, "soon")
    result = runner.invoke(cli.app, ["mlflow", "upload", str(folder)])
    assert (
        isinstance(result.exception, MayaError) and "MAYA_MLFLOW_WAIT=soon is not a number" in result.exception.problem
    )
