"""What an emulated program logs to experiment trackers reaches no server, whatever mode it asks for. The trackers are real, and so is the server
that they are pointed to; without the emulation, the same program does reach it."""

from __future__ import annotations

import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

MAYA = str(Path(sys.executable).with_name("maya"))
TRAIN = """
import torch
START
model = torch.nn.Linear(64, 64).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 64, device=DEVICE)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    LOG
END
print("trained")
"""
PROGRAMS = {
    "wandb": (
        "import wandb; wandb.login(); run = wandb.init(project='p', mode='online', config={'lr': 0.1}); print(run.name, wandb.config.lr)",
        "wandb.log({'loss': loss.item()})",
        "wandb.finish()",
    ),
    "tensorboard": (
        "from torch.utils.tensorboard import SummaryWriter; writer = SummaryWriter('runs')",
        "writer.add_scalar('loss', loss.item(), step)",
        "writer.close()",
    ),
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the requests that it got."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(401)
            self.end_headers()

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}", requests
    serving.shutdown()
    serving.server_close()


def run(folder: Path, name: str, url: str, device: str, *command: str) -> subprocess.CompletedProcess[str]:
    start, log, end = PROGRAMS[name]
    text = TRAIN.replace("START", start).replace("LOG", log).replace("END", end).replace("DEVICE", repr(device))
    (folder / "train.py").write_text(text)
    variables = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "WANDB_INIT_TIMEOUT": "10", "HOME": str(folder)}
    return subprocess.run(
        [*command, sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, **variables, "MAYA_CACHE_DIR": os.environ.get("MAYA_CACHE_DIR", str(Path.home() / ".cache/maya"))},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_sent_and_nothing_is_left(tmp_path: Path, server: tuple[str, list[str]], name: str) -> None:
    url, requests = server
    done = run(tmp_path, name, url, "cuda", MAYA, "run", "--")
    assert done.returncode == 0, done.stderr
    assert requests == []
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"maya-out", "train.py"}


@pytest.mark.slow
def test_without_the_emulation_it_is_sent(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    url, requests = server
    run(tmp_path, "wandb", url, "cpu")
    assert requests


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_the_trackers_are_installed(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
