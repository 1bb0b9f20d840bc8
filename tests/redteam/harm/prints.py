"""10 GB to standard output."""

OUTCOMES = {"import": "too_much_output", "build": "too_much_output", "forward": "too_much_output"}


def harm(what):
    for _ in range(10_000):
        print("x" * 1_000_000)
