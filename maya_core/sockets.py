"""The folder for private sockets."""

from __future__ import annotations

import os
import tempfile

LONGEST = 60  # characters of the folder: a socket's path may have 107, with our own part of it


def folder_for_sockets(below: int = 0) -> str | None:
    """The folder for temporary files, as `tempfile` takes it; /tmp if its name is too long. `below` counts the characters of a folder in it."""
    return "/tmp" if len(tempfile.gettempdir()) + below > LONGEST and os.access("/tmp", os.W_OK) else None
