"""What a gate raises when it cannot be asked here."""

from __future__ import annotations

from tideforge.errors import TideforgeError


class Unverifiable(TideforgeError):
    """No fault of the candidate's; the message says why, and stands in red for whoever approves."""
