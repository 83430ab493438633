"""Errors meant for the user: what happened, on what, and what to do next."""


class MayaError(Exception):
    """A problem that the user can solve. `problem` says what happened and to what, and `advice` what to do next."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"{problem}\n{advice}" if advice else problem)
        self.problem = problem
        self.advice = advice
