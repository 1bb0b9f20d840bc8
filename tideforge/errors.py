"""The one exception tree. Whatever a user can mend is a UserError: one line that names the thing and the remedy."""

from __future__ import annotations

PREFIX = "tideforge: "  # of every line on standard error that ends a process of this project


class TideforgeError(Exception):
    """Base of every error that this project raises on purpose."""


class UserError(TideforgeError):
    """Bad input or environment. The command line prints it as one line and exits with code 2.

    `thing` names the file, field or flag; `problem` says what is wrong with it; `remedy` says what to do.
    """

    def __init__(self, thing: str, problem: str, remedy: str) -> None:
        super().__init__(f"{thing}: {problem}; {remedy}")
        self.thing, self.problem, self.remedy = thing, problem, remedy


class Told(UserError):
    """What another process of this project ended with, code 2, in its own words."""

    def __init__(self, line: str) -> None:
        thing, _, rest = line.removeprefix(PREFIX).partition(": ")
        problem, _, remedy = rest.rpartition("; ")
        super().__init__(thing, problem, remedy)
        self.args = (line.removeprefix(PREFIX),)


class MissingExtra(UserError):
    """An optional dependency is absent; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, "is not installed", f"pip install 'tideforge[{extra}]'")


class ProtocolError(TideforgeError):
    """A peer on a socket sent something that the protocol does not allow, or went away in mid-message."""


class PeerGone(ProtocolError):
    """The peer closed its end. For a worker this is the observation from which an outcome is derived."""


class PeerTimeout(ProtocolError):
    """The peer did not answer within its deadline."""


class CandidateError(TideforgeError):
    """A candidate's own code failed; `outcome` is a value of engine.outcome.Outcome."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome, self.message = outcome, message


class IncumbentLost(TideforgeError):
    """The incumbent's worker died again and again, so that nothing could be measured beside it: no candidate's fault."""


class Refused(TideforgeError):
    """A release was not accepted by the serving engine; the message says why. Nothing has changed."""
