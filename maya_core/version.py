"""The version of Maya, and the folder that it is installed in."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE = Path(__file__).parent
