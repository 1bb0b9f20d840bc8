"""Makes data/samples/azure_conv_2023.parquet from the published CSV: `python -m tideforge.data.make_samples CSV`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from tideforge.data.schema import LOG_SCHEMA, REQUIRED

TARGET = Path(__file__).parent / "samples" / "azure_conv_2023.parquet"


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


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), TARGET), "rows ->", TARGET)
