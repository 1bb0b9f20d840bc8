"""The HTTP server: OpenAI's API over a live engine core, and the ship of an approved forward into it. No torch here."""
