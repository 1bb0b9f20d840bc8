"""NaN in the first row."""

OUTCOMES = {"after": "not_finite"}


def harm(batch):
    batch.logits[0] = float("nan")
