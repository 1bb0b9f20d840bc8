"""Makes data/samples/NAME.parquet from a published trace: `python -m tideforge.data.make_samples FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from tideforge.data.schema import LOG_SCHEMA, REQUIRED

SAMPLES = Path(__file__).parent / "samples"
FIRST = "azure_conv_2023"  # has ids of its own kind; the others came later, as ingest makes them


def convert(source: Path, target: Path) -> int:
    """Writes the rows of an Azure LLM inference trace in this project's schema and returns how many they are."""
    kept_as_text = pyarrow.csv.ConvertOptions(column_types={"TIMESTAMP": pa.string()})
    table = pyarrow.csv.read_csv(source, convert_options=kept_as_text)
    cut = pc.utf8_slice_codeunits(table["TIMESTAMP"], 0, len("2023-11-16 18:15:46.680590"))
    columns = [
        pa.array([f"azure-conv-{row}" for row in range(table.num_rows)]),
        pc.assume_timezone(pc.cast(cut, pa.timestamp("us")), "UTC"),
        table["ContextTokens"],
        table["GeneratedTokens"],
    ]
    schema = pa.schema([LOG_SCHEMA.field(name) for name in REQUIRED])
    pq.write_table(pa.table(columns, schema=schema), target, compression="zstd")
    return int(table.num_rows)


def through_ingest(source: Path, target: Path) -> int:
    """The same for any known format; its good rows."""
    from tideforge.data.readers import read_logs

    reading = read_logs([source])
    reading.write_requests(target)
    return reading.report.kept


if __name__ == "__main__":
    given = Path(sys.argv[1])
    made = SAMPLES / f"{given.stem}.parquet"
    print((convert if given.stem == FIRST else through_ingest)(given, made), "rows ->", made)
