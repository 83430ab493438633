"""Adds Maya's flags to the launchers of other projects. maya_launchers.pth loads this package only in their processes."""
