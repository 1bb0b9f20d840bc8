"""Agents that look for a faster forward, the board they share and the node that runs them."""
