"""What `maya doctor` finds: whether Maya can run in this environment, and what to do if it cannot.

Nothing here imports torch, so that the answer comes at once and also if torch is broken.
"""
