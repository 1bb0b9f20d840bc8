from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_what_the_records_say() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "figures.py"), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
