"""A process in a session of its own, without this one's environment, whose parent is gone."""

import subprocess

OUTCOMES = {"import": "left_processes", "build": "left_processes", "forward": "left_processes"}
started = []


def harm(what):
    if not started:
        started.append("sleep 42421 & exit 0")
        subprocess.run(["/bin/sh", "-c", started[0]], start_new_session=True, env={}, check=True, close_fds=True)
