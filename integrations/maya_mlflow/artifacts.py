"""The server of artifacts. Before MLflow 3.8, a client stores and reads artifacts on the server that the process is set to, even if the
client was made for another one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

VARIABLE = "MLFLOW_TRACKING_URI"  # which MLflow sets too, for child processes


@contextlib.contextmanager
def server_of(client: Any) -> Iterator[None]:
    """Artifacts are those of the client's own server within this block."""
    import mlflow
    from mlflow.tracking._tracking_service import utils

    if Version(mlflow.__version__) >= Version("3.8"):
        yield
        return
    state: Any = utils
    uri, variable = state._tracking_uri, os.environ.get(VARIABLE)
    mlflow.set_tracking_uri(client.tracking_uri)
    try:
        yield
    finally:
        state._tracking_uri = uri
        os.environ.pop(VARIABLE, None)
        if variable is not None:
            os.environ[VARIABLE] = variable
