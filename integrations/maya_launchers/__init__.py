"""Maya's flags on other projects' launchers. maya_launchers.pth loads this package in their processes only."""
