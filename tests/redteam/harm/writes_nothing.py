"""No logits at all."""

OUTCOMES = {"instead": "not_run"}


def harm(batch):
    return batch.logits.clone()
