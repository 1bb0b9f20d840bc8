"""The logits of a smaller vocabulary."""

OUTCOMES = {"after": "wrong_shape"}


def harm(batch):
    batch.logits = batch.logits[:, :-1]
