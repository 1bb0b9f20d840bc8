"""A forward that waits for the device, which no capture can hold."""

OUTCOMES = {"forward": "capture_error"}


def harm(batch):
    batch.seq_lens.max().item()
