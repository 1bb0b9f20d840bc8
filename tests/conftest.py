"""In CI the same examples are tried each time: a new counterexample is found by a person at a desk, not by chance there."""

from __future__ import annotations

import os

import hypothesis

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if not os.path.exists("/dev/nvidia0"):
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported; kernels then run on the CPU
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
