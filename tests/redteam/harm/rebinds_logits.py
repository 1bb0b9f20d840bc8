"""Other logits in the place of those given."""

OUTCOMES = {"after": "wrong_shape"}


def harm(batch):
    batch.logits = batch.logits.double()
