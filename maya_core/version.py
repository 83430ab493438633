"""The version of Maya, and the folder that it is installed in."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent
