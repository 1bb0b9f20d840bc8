"""Verification: nothing ships without all of its gates. Policy lives here, arithmetic in engine/."""
