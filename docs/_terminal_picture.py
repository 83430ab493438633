"""Draws the terminal output of a prediction as a picture, for README and docs:

maya run --gpu h100 --json prediction.json -- torchrun --nproc-per-node 8 examples/train_llama_fsdp2.py
python docs/_terminal_picture.py prediction.json docs/images/terminal.png     # needs chromium and its driver
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from selenium import webdriver

from maya_core.report.prediction_file import read_prediction
from maya_core.report.terminal import render

WIDTH = 118  # columns
LINES = 33  # the rest of the output is tables


def main(source: str, target: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(render(read_prediction(Path(source))))
    lines = console.export_text(styles=True, clear=True).splitlines()[:LINES]
    shown = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    shown.print(Text.from_ansi("\n".join(lines)))
    page = shown.export_html(theme=MONOKAI, inline_styles=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "terminal.html"
        style = "<style>body{margin:0;padding:14px;background:#0c0c0c} pre{font:15px/1.35 'DejaVu Sans Mono',monospace;width:max-content}</style>"
        file.write_text(page.replace("</head>", f"{style}</head>"))
        _photograph(file, target, folder)


def _photograph(file: Path, target: str, profile: str) -> None:
    options = webdriver.ChromeOptions()
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "no-first-run",
        "hide-scrollbars",
        f"user-data-dir={profile}/profile",
    ):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options)
    try:
        browser.get(file.as_uri())
        pre = browser.find_element("tag name", "pre")
        browser.set_window_size(pre.size["width"] + 40, pre.size["height"] + 170)
        browser.find_element("tag name", "body").screenshot(target)
    finally:
        browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
