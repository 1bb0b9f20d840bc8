"""An exception that comes only while a graph is captured."""

import torch

OUTCOMES = {"forward": "capture_error"}


def harm(what):
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("on purpose")
