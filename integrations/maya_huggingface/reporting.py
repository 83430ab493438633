"""`import maya_huggingface.reporting` enables report_to="maya" in this process. Under `maya run` it is always enabled."""

from maya_core.patches import Patches
from maya_huggingface.report_to import register

register(Patches())
