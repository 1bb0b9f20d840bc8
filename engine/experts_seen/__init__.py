"""How many experts a decode step's tokens activate, by what the tokens are, and what that does to a step's time."""
