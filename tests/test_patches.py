"""Patches of other projects: undone in one order, and loud where a name is gone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from maya_core.errors import MayaError
from maya_core.framework_patches import FrameworkPatches, checked_versions
from maya_core.messages import Notes
from maya_core.patches import MissingName, Patches, first_of
from maya_core.torch_seam.names import Name


class Trainer:
    def fit(self) -> str:
        return "fit"

    @classmethod
    def make(cls) -> str:
        return cls.__name__

    @staticmethod
    def version() -> str:
        return "1"


def doubled(function: Any) -> Any:
    return lambda *args: function(*args) * 2


def test_a_missing_name_is_not_replaced_in_silence() -> None:
    patches = Patches()
    with pytest.raises(MissingName, match=r"has no .*Trainer\.evaluate, which Maya replaces"):
        patches.set(Trainer, "evaluate", None)
    patches.add(Trainer, "evaluate", None)  # a new name
    patches.undo()
    assert not hasattr(Trainer, "evaluate")


def test_wrapped_methods_stay_what_they_are() -> None:
    patches = Patches()
    for name in ("fit", "make", "version"):
        patches.wrap(Trainer, name, doubled)
    assert (Trainer().fit(), Trainer.make(), Trainer.version()) == ("fitfit", "TrainerTrainer", "11")
    patches.undo()
    assert (Trainer().fit(), Trainer.make(), Trainer.version()) == ("fit", "Trainer", "1")


def test_the_first_name_that_exists() -> None:
    assert first_of(Trainer, "train", "fit") is Trainer.fit
    with pytest.raises(MissingName, match="train"):
        first_of(Trainer, "train", "run")


def framework(patches: Patches, notes: Notes, *requirements: str) -> FrameworkPatches:
    return FrameworkPatches(patches, checked_versions(requirements), notes)


def test_patches_of_integrations_and_of_maya_are_undone_in_one_order() -> None:
    patches = Patches()
    theirs = framework(patches, Notes())
    for each in (patches, theirs, patches, theirs):
        each.wrap(Trainer, "fit", doubled)
    assert Trainer().fit() == "fit" * 16
    patches.undo()
    assert Trainer().fit() == "fit"


def test_an_integration_goes_on_without_a_missing_name(capsys: pytest.CaptureFixture[str]) -> None:
    patches, notes = Patches(), Notes()
    theirs = framework(patches, notes)
    theirs.set(Trainer, "evaluate", None)
    theirs.set(Trainer, "evaluate", None)
    theirs.set(Trainer, "fit", lambda self: "emulated")
    assert Trainer().fit() == "emulated"
    patches.undo()
    assert len(notes.sentences) == 1
    assert "Trainer.evaluate" in notes.sentences[0]
    assert capsys.readouterr().err.count("maya: ") == 1


def test_what_an_action_misses_in_a_module_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes(quiet=True)
    theirs = framework(Patches(), notes)
    theirs.when_imported("json", lambda module: module.no_such_class.method)
    assert "json.no_such_class" in notes.sentences[0]
    assert capsys.readouterr().err == ""  # another rank has told it


def test_what_protects_the_user_must_exist() -> None:
    theirs = framework(Patches(), Notes())
    with pytest.raises(MayaError, match="maya help versions"):
        theirs.require(Trainer, "upload", None)


@pytest.mark.parametrize(("checked", "told"), [(">=0.1,<1", True), (">=1", False), ("", False)])
def test_a_version_outside_of_the_checked_range_is_told(checked: str, told: bool) -> None:
    notes = Notes(quiet=True)
    framework(Patches(), notes, f"pytest{checked}; extra == 'x'").supports("pytest" if checked else "numpy")
    expected = [
        f"pytest {pytest.__version__} is installed, and Maya was checked on pytest >=0.1,<1: it may miss what changed in pytest."
    ]
    assert notes.sentences == (expected if told else [])


def test_a_name_of_torch_that_should_exist_and_does_not() -> None:
    module = ModuleType("torch_of_tomorrow")
    sys.modules[module.__name__] = module
    patches = Patches()
    try:
        with pytest.raises(MissingName, match=r"torch_of_tomorrow\._renamed"):
            Name(module.__name__, "_renamed").replace(patches, None)
        Name(module.__name__, "_gone", until=(2, 10)).replace(patches, None)  # no supported version has it
        Name(module.__name__, "_cuda", late=True).replace(patches, 1)
        assert vars(module)["_cuda"] == 1
    finally:
        patches.undo()
        del sys.modules[module.__name__]
    assert not hasattr(module, "_cuda")
