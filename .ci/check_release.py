"""Checks that a tag, the version of the package and the changelog agree: python .ci/check_release.py v0.2.0"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, version: str, changelog: str) -> list[str]:
    """What keeps this tag from being released, in words."""
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, but maya_core/version.py has {version}: the tag should be v{version}")
    released = re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if released is None:
        found.append(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD'")
    elif not released[1].strip():
        found.append(f"the section '## {version}' of CHANGELOG.md is empty")
    unreleased = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if unreleased is not None and unreleased[1].strip():
        found.append("CHANGELOG.md still has entries under '## Unreleased'")
    return found


if __name__ == "__main__":
    version = str(runpy.run_path(str(ROOT / "maya_core" / "version.py"))["__version__"])
    found = problems(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text())
    sys.exit("\n".join(found) or 0)
