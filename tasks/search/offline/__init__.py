"""The agent that needs no key: a seeded search over rewrites of the raw source, guided by what the engine measured."""
