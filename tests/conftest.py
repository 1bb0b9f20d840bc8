"""In CI the same examples are tried each time: a new counterexample is found by a person at a desk, not by chance there."""

from __future__ import annotations

import os

import hypothesis

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
