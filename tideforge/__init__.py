"""Tideforge keeps LLM endpoints fast while their traffic changes."""

__version__ = "0.1.0"
