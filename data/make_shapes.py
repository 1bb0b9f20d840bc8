"""Joint histograms of the public traces, for the generator of `bench_drift`: python -m tideforge.data.make_shapes FOLDER

FOLDER holds azure_conv_2023.csv and azure_code_2023.csv (Azure Public Dataset, CC-BY 4.0, Microsoft) and
mooncake_conversation.jsonl (Mooncake FAST25 release, Apache-2.0). What is kept: counts by quarter octave of prompt length
and octave of output length.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tideforge.data.files import canonical_json, write_whole
from tideforge.data.logs import find_logs
from tideforge.data.readers import read_logs

TRACES = {
    "azure_conv_2023": "azure_conv_2023.csv",
    "azure_code_2023": "azure_code_2023.csv",
    "mooncake_conversation": "mooncake_conversation.jsonl",
}
QUERY = """SELECT floor(4 * log2(prompt_tokens))::INTEGER, floor(log2(output_tokens))::INTEGER, count(*)
FROM requests GROUP BY ALL ORDER BY ALL"""


def shapes(folder: Path) -> dict[str, list[list[int]]]:
    """trace -> [quarter octave of the prompt, octave of the output, requests]."""
    found = {}
    for name, file in TRACES.items():
        rows = read_logs(find_logs([str(folder / file)])).db.execute(QUERY).fetchall()
        found[name] = [[int(value) for value in row] for row in rows]
    return found


if __name__ == "__main__":
    target = Path(__file__).with_name("length_shapes.json")
    write_whole(target, canonical_json(shapes(Path(sys.argv[1]))))
    print(json.dumps({name: sum(row[2] for row in rows) for name, rows in json.loads(target.read_text()).items()}))
