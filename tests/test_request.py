"""One request behind every command, plugin, flag, variable and recipe."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from maya_launchers import flags
from typer.testing import CliRunner

import maya_core
from maya_core import command_options, request
from maya_core.command_options import takes
from maya_core.errors import MayaError
from maya_core.hardware.host_costs import Host
from maya_core.launch.settings import ProcessSettings
from maya_core.request import (
    ClusterOptions,
    EmulationOptions,
    FileOptions,
    Option,
    Options,
    PredictionOptions,
    Request,
    options_of,
    plugin_signature,
)
from maya_core.search.recipe import RECIPE_OPTIONS
from maya_core.session.plugin import PluginSession


def command(*groups: type[Options], **options: Any) -> Any:
    """A command with these options, called with words: it returns the request that it received."""
    app, received = typer.Typer(), []

    @app.command()
    @takes(*groups, **options)
    def probe(request: Request) -> None:
        received.append(request)

    def call(*words: str) -> Request:
        done = CliRunner().invoke(app, list(words))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return received[-1]

    return call


RUN = (ClusterOptions, EmulationOptions, PredictionOptions, FileOptions)


def test_a_command_passes_on_what_was_typed() -> None:
    found = command(*RUN)(
        "--gpu", "b200", "--nodes", "2", "--steps", "all", "--ranks", "5,0", "--json", "p.json", "--host", "measured", "--burst"
    )  # fmt: skip
    assert found == Request(
        gpu="b200", nodes=2, steps=None, ranks=(0, 5), json_file=Path("p.json"), host=Host.MEASURED, burst=True
    )


def test_without_options_everything_is_at_its_default() -> None:
    assert command(*RUN)() == Request()
    assert not command(*RUN)().model_fields_set - {"tracking"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--steps", "few"), "--steps few: not a number of steps"),
        (("--steps", "0"), "--steps 0: not a number of steps"),
        (("--ranks", "first"), "--ranks first: not ranks"),
    ],
)
def test_a_mistake_is_reported_as_it_was_typed(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(MayaError, match=problem):
        command(*RUN)(*words)


def test_in_python_a_mistake_is_reported_with_its_name() -> None:
    with pytest.raises(MayaError, match="there is no option 'gpuss'"):
        Request.of(gpuss="h100")
    with pytest.raises(MayaError, match="nodes=0 is not valid"):
        Request.of(nodes=0)
    with pytest.raises(MayaError, match="gpus_per_node=65 is not valid"):
        Request.of(gpus_per_node=65)
    with pytest.raises(MayaError, match="flash9"):
        Request.of(attention="flash9").check()


def test_a_recorded_job_refuses_options_that_would_do_nothing() -> None:
    with pytest.raises(MayaError, match="there is no option 'steps'"):
        maya_core.predict("maya-out", steps=5)
    with pytest.raises(MayaError, match="there is no option 'gpu'"):
        maya_core.predict("maya-out", gpu="b200")
    with pytest.raises(MayaError, match="there is no option 'ranks'"):
        maya_core.what_if("maya-out", ranks="all")


HARDWARE = """
[gpus.mine]
base = "h100"
memory_bytes = "40GiB"
"""


def test_a_hardware_file_is_used_and_left_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of the user's own, by every way that takes the option."""
    monkeypatch.delenv("MAYA_HARDWARE", raising=False)
    (tmp_path / "mine.toml").write_text(HARDWARE)
    file = str(tmp_path / "mine.toml")
    with maya_core.emulate("mine", hardware=file) as block:
        torch.ones(1024, device="cuda")
    assert block.prediction.cluster.gpu == "mine"
    assert "MAYA_HARDWARE" not in os.environ
    assert maya_core.predict(block.job, hardware=file).cluster.gpu == "mine"
    session = PluginSession("MayaEmulator", gpu="mine", hardware=file)
    for _ in range(2):  # a plugin may emulate again
        session.begin()
        assert session.integration is not None and session.integration.gpu.name == "mine"
        session.drop()
    assert "MAYA_HARDWARE" not in os.environ
    with pytest.raises(MayaError, match="unknown GPU 'mine'"):
        maya_core.emulate("mine")


@pytest.mark.parametrize("name", ["json", "html"])
def test_files_that_emulate_would_not_write_are_refused(name: str) -> None:
    with pytest.raises(MayaError, match=f"{name}= would do nothing"):
        maya_core.emulate("h100", **{name: "file"})


def test_a_request_reaches_an_emulated_process_unchanged() -> None:
    asked = Request.of(gpu="a100", steps="all", ranks="0,3", json="p.json", tokens_per_step=5e6, out="there")
    told = ProcessSettings.model_validate_json(ProcessSettings(request=asked).model_dump_json())
    assert told.request == asked


def test_environment_variables_name_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAYA_GPU", "b200")
    monkeypatch.setenv("MAYA_TOKENS_PER_STEP", "4e6")
    assert request.variables() == {"gpu": "b200", "tokens_per_step": "4e6"}
    assert Request.of(**request.variables()).tokens_per_step == 4e6


def test_every_option_is_everywhere() -> None:
    """A field of the request is an option of `maya run`, an argument of plugins, a flag of launchers, and a field of recipes."""
    names = {name for name, _, _ in options_of(Request)}
    in_plugins = {name for name, _, option in options_of(Request) if option.in_plugins}
    assert names <= set(inspect.signature(takes(*RUN)(lambda request: None)).parameters)
    assert in_plugins <= set(plugin_signature().parameters)
    assert {f"emulate_{name}" for name in names} <= set(flags.names())
    own = {"samples_per_step", "tokens_per_step", "profile", "hardware"}
    assert PredictionOptions.model_fields.keys() - own == RECIPE_OPTIONS
    assert all(option.help.endswith(".") for _, _, option in options_of(Request))


def test_a_new_option_needs_nothing_but_its_field() -> None:
    class WithNewOption(PredictionOptions):
        deterministic: Annotated[bool, Option("Emulate deterministic algorithms.")] = False

    shown = {name: (field, option) for name, field, option in options_of(WithNewOption)}
    assert request.is_switch(shown["deterministic"][0])
    parameter = command_options._parameter("deterministic", *shown["deterministic"])
    assert parameter.default is False
    assert typer.main.get_command_name("deterministic") == "deterministic"
    assert inspect.signature(takes(WithNewOption)(lambda request: None)).parameters["deterministic"].default is False


def test_an_option_can_mean_something_else_for_a_command() -> None:
    parameters = inspect.signature(
        takes(ClusterOptions, only=("nodes",), help={"nodes": "Something else."})(lambda request: None)
    ).parameters
    assert list(parameters) == ["nodes"]
    assert parameters["nodes"].annotation.__metadata__[0].help == "Something else."
