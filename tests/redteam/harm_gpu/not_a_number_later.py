"""NaN that comes only with the graphs: written while one is captured, so each replay writes it."""

import torch

OUTCOMES = {"after": "not_finite"}
ON_GPU = {"after": ("not_finite", "wrong", "forward_error")}


def harm(batch):
    if torch.cuda.is_current_stream_capturing():
        batch.logits.fill_(float("nan"))
