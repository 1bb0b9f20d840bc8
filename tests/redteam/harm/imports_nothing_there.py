"""A name that torch does not have."""

OUTCOMES = {"import": "import_error"}


def harm(what):
    from torch import no_such_name_at_all  # noqa: F401
