"""`import maya_huggingface.reporting` makes report_to="maya" known, for as long as the process lives. Under `maya run` it is known
without."""

from maya_core.patches import Patches
from maya_huggingface.report_to import register

register(Patches())
