"""python -m maya_core.predictor.fitting DATA: fits the shipped profiles to a folder of measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from maya_core.errors import MayaError
from maya_core.predictor.fitting.fitted import FAMILIES
from maya_core.predictor.profile import SHIPPED, write_profile


def main(
    data: Annotated[Path, typer.Argument(help="Folder with the measurements; `maya help predictor` says which files.")],
    family: Annotated[list[str] | None, typer.Option(help="Only these families.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the profiles.")] = SHIPPED,
    evaluate: Annotated[
        bool, typer.Option(help="Fit again without a part of the rows, and note the errors on it.")
    ] = True,
) -> None:
    """Fits every family of work to the measurements and writes a profile for each GPU."""
    console = Console()
    if unknown := set(family or ()) - set(FAMILIES):
        raise MayaError(f"unknown family: {', '.join(sorted(unknown))}.", f"Known families: {', '.join(FAMILIES)}.")
    begun = time.monotonic()
    with console.status("reading") as status:
        for name, fit in FAMILIES.items():
            if family and name not in family:
                continue
            status.update(f"{name}: reading")
            for profile, _ in fit(data, evaluate=evaluate):
                write_profile(out / name / f"{profile.gpu}.json", profile)
                console.print(f"[bold]{name} {profile.gpu}[/bold]  {time.monotonic() - begun:.0f} s")
                for model, splits in profile.held_out.items():
                    for each in splits:
                        console.print(f"  {model:24} {each.split:44} {each.rows:6} rows  median {each.median_pct:5.1f} %  p90 {each.p90_pct:5.1f} %", highlight=False, soft_wrap=True)  # fmt: skip
                status.update(f"{name}: after {profile.gpu}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except MayaError as error:
        Console(stderr=True).print(f"{error.problem} {error.advice}", highlight=False)
        raise SystemExit(2) from None
