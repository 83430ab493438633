"""Where private sockets go."""

from __future__ import annotations

import os
import tempfile

LONGEST = 60  # characters; a socket's path has 107 at the most, with our own part of it


def folder_for_sockets(below: int = 0) -> str | None:
    """The folder for temporary files, as `tempfile` takes it; another if its name is too long, with so many characters of a folder in it."""
    return "/tmp" if len(tempfile.gettempdir()) + below > LONGEST and os.access("/tmp", os.W_OK) else None
