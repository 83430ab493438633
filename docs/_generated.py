"""Fills the pages of the site with what the code itself declares (maya_core/documentation.py). MkDocs calls `on_page_markdown` for every page
(mkdocs.yml, `hooks`)."""

from __future__ import annotations

from typing import Any

from maya_core.cli import app
from maya_core.documentation import add_integrations, filled

add_integrations(app)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown, app)
