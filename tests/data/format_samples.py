"""A small sample of each format, shaped as its source writes it, and what must come out of it."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NS = 1_790_000_000_000_000_000  # 2026-09-21 14:13:20 UTC


@dataclasses.dataclass(frozen=True)
class Sample:
    """`rows` of (arrival in ms since 1970, prompt, output) in order of arrival; `first` is of the first row."""

    name: str
    file: str
    write: Callable[[Path], None]
    rows: list[tuple[int, int, int]]
    first: dict[str, Any] = dataclasses.field(default_factory=dict)
    passed: int = 0
    empty: bytes = b""  # a file of this kind with no requests in it

    def make(self, folder: Path) -> Path:
        self.write(folder / self.file)
        return folder / self.file


def text(content: str) -> Callable[[Path], None]:
    return lambda path: void(path.write_text(content))


def void(_: object) -> None:
    return None


def lines(*values: dict[str, Any]) -> Callable[[Path], None]:
    return text("".join(json.dumps(value) + "\n" for value in values))


def ms(written: str) -> int:
    return round(datetime.datetime.fromisoformat(written).replace(tzinfo=datetime.UTC).timestamp() * 1000)


RELATIVE = ms("2000-01-01")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def vllm(asctime: str, message: str) -> dict[str, Any]:
    return {
        "asctime": asctime, "levelname": "INFO", "name": "vllm.entrypoints.logger", "processName": "MainProcess",
        "process": 7, "message": message, "vllm_process_name": "APIServer",
    }  # fmt: skip


PARAMS = "params: SamplingParams(n=1, temperature=0.7, max_tokens=100), lora_request: None."
VLLM = (
    vllm("2026-09-21 14:13:20,250", f"Received request chatcmpl-a26: {PARAMS}"),
    vllm("2026-09-21 14:13:20,251", "Request chatcmpl-a26 details: prompt: 'a prompt_token_ids: [9]', "
         "prompt_token_ids: [1, 2, 3, 4], prompt_embeds shape: None."),
    vllm("2026-09-21 14:13:20,300", "Added request chatcmpl-a26."),
    vllm("2026-09-21 14:13:21,000", f"Received request cmpl-77-0: prompt: 'x: y', {PARAMS[:-1]}, prompt_token_ids: "
         "[5, 6], prompt_embeds shape: None, lora_request: None."),
    vllm("2026-09-21 14:13:21,100", "Generated response chatcmpl-a26 (streaming delta): output: 'so', output_token_ids: "
         "[11, 12], finish_reason: None"),
    vllm("2026-09-21 14:13:21,250", "Generated response chatcmpl-a26 (streaming delta): output: '', output_token_ids: "
         "[13], finish_reason: length"),
    vllm("2026-09-21 14:13:21,251", "Generated response chatcmpl-a26 (streaming complete): output: 'so', "
         "output_token_ids: None, finish_reason: streaming_complete"),
    vllm("2026-09-21 14:13:22,500", "Generated response cmpl-77: output: 'finish_reason: abort', output_token_ids: "
         "[1, 2, 3, 4, 5, 6], finish_reason: stop"),
)  # fmt: skip


def sglang(event: str, at: str, rid: str, meta: dict[str, Any] | None = None) -> dict[str, Any]:
    obj = {"rid": rid, "stream": False, "text": "a secret prompt"}
    out = {"out": {"text": "a secret answer", "meta_info": {"id": rid, **meta}}} if meta else {}
    return {"timestamp": at, "event": event, "rid": rid, "obj": obj, **out}


def attributes(**values: Any) -> list[dict[str, Any]]:
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue"}
    return [
        {"key": key, "value": {kinds[type(value)]: str(value) if isinstance(value, int) else value}}
        if not isinstance(value, list)
        else {"key": key, "value": {"arrayValue": {"values": [{"stringValue": each} for each in value]}}}
        for key, value in values.items()
    ]


SEMCONV: dict[str, Any] = {
    "gen_ai.operation.name": "chat", "gen_ai.request.model": "qwen", "gen_ai.usage.input_tokens": 12,
    "gen_ai.usage.output_tokens": 34, "gen_ai.response.finish_reasons": ["stop"], "gen_ai.response.id": "r-1",
    "gen_ai.input.messages": "a secret prompt",
}  # fmt: skip
OF_VLLM: dict[str, Any] = {
    "gen_ai.request.id": "r-2", "gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 6,
    "gen_ai.latency.time_to_first_token": 0.25,
}  # fmt: skip


def span(number: int, start_ms: int, end_ms: int, **values: Any) -> dict[str, Any]:
    return {
        "traceId": "5b8aa5a2d2c872e8321cf37308d69df2", "spanId": f"5fb397be34d26b{number:02x}", "name": "chat qwen",
        "kind": 3, "startTimeUnixNano": str(NS + start_ms * 1_000_000), "endTimeUnixNano": str(NS + end_ms * 1_000_000),
        "attributes": attributes(**values), "status": {},
    }  # fmt: skip


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    resource = {"attributes": attributes(**{"service.name": "gateway", "cloud.region": "eu"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


SPANS = (span(1, 0, 1500, **SEMCONV), span(2, 10, 20, **{"http.route": "/v1"}), span(3, 700, 1700, **OF_VLLM))
OTEL_ROWS = [(NS // 1_000_000, 12, 34), (NS // 1_000_000 + 700, 5, 6)]
OTEL_FIRST = {"request_id": "r-1", "model": "qwen", "region": "eu", "finish_reason": "stop", "latency_ms": 1500.0}


def as_map(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]


def otel_parquet(path: Path) -> None:
    texts = pa.map_(pa.string(), pa.string())
    table = pa.table(
        {
            "span_id": ["1", "2", "3"],
            "start_time_unix_nano": pa.array([NS, NS + 10_000_000, NS + 700_000_000], pa.uint64()),
            "end_time_unix_nano": pa.array([NS + 1_500_000_000, NS + 20_000_000, NS + 1_700_000_000], pa.uint64()),
            "attributes": pa.array([as_map(SEMCONV), [("http.route", "/v1")], as_map(OF_VLLM)], texts),
            "resource_attributes": ['{"cloud.region": "eu"}'] * 3,
        }
    )
    pq.write_table(table, path)


def clickhouse_parquet(path: Path) -> None:
    texts = pa.map_(pa.string(), pa.string())
    table = pa.table(
        {
            "Timestamp": pa.array([NS, NS + 10_000_000, NS + 700_000_000], pa.timestamp("ns")),
            "TraceId": ["t"] * 3,
            "SpanId": ["1", "2", "3"],
            "Duration": pa.array([1_500_000_000, 10_000_000, 1_000_000_000], pa.uint64()),
            "SpanAttributes": pa.array([as_map(SEMCONV), [("http.route", "/v1")], as_map(OF_VLLM)], texts),
            "ResourceAttributes": pa.array([[("cloud.region", "eu")]] * 3, texts),
        }
    )
    pq.write_table(table, path)


QWEN = {"chat_id": 159, "parent_chat_id": -1, "type": "text", "turn": 1, "hash_ids": [1089, 1090]}
SAMPLES = (
    Sample("azure-llm-inference-csv", "2023.csv", text(AZURE + "2023-11-16 18:15:46.6800000,374,44\n"),
           [(ms("2023-11-16 18:15:46.680"), 374, 44)], empty=AZURE.encode()),
    Sample("azure-llm-inference-csv", "2024.csv", text(AZURE + "2024-05-10 02:00:00.250000+02:00,2162,5\n"),
           [(ms("2024-05-10 00:00:00.250"), 2162, 5)], empty=AZURE.encode()),
    Sample("burstgpt-csv", "burst.csv", text(
        BURST + "5,1,2.5,ChatGPT,472,18,490,Conversation log\n45,2,,GPT-4,1087,230,1317,API log\n"),
           [(RELATIVE + 5000, 472, 18), (RELATIVE + 45000, 1087, 230)], {"model": "ChatGPT", "latency_ms": 2500.0},
           empty=BURST.encode()),
    Sample("burstgpt-csv", "first-release.csv", text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"),
           [(RELATIVE + 5000, 472, 18)], empty=BURST.encode()),
    Sample("mooncake-jsonl", "mooncake.jsonl", lines(
        {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]},
        {"timestamp": 3500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}),
           [(RELATIVE, 6758, 500), (RELATIVE + 3500, 7322, 490)], {"prefix_hashes": [0, 1, 2]}),
    Sample("qwen-bailian-jsonl", "qwen.jsonl", lines(
        {**QWEN, "timestamp": 61.114, "input_length": 521, "output_length": 132}),
           [(RELATIVE + 61114, 521, 132)], {"prefix_hashes": [1089, 1090]}),
    Sample("sglang-request-log", "host_0.log", lines(
        sglang("request.received", "2026-09-21T14:13:20.000100", "a"),
        sglang("request.finished", "2026-09-21T14:13:22.500000", "a", {
            "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 20, "completion_tokens": 7,
            "cached_tokens": 16, "e2e_latency": 2.0}),
        sglang("request.finished", "2026-09-21T14:13:23.000000", "b", {
            "finish_reason": None, "prompt_tokens": 9, "completion_tokens": 8, "e2e_latency": 1.0,
            "request_received_ts": NS / 1e9 + 1.5, "prefill_finished_ts": NS / 1e9 + 1.75})),
           [(NS // 1_000_000 + 500, 20, 7), (NS // 1_000_000 + 1500, 9, 8)],
           {"request_id": "a", "cached_tokens": 16, "latency_ms": 2000.0, "finish_reason": "stop", "ttft_ms": None},
           passed=1),
    Sample("vllm-request-log", "vllm.log", lines(*VLLM),
           [(NS // 1_000_000 + 250, 4, 3), (NS // 1_000_000 + 1000, 2, 6)],
           {"request_id": "chatcmpl-a26", "latency_ms": 1001.0, "finish_reason": "length"}, passed=1),
    Sample("otel-genai-otlp-json", "spans.jsonl", lines(otlp(*SPANS[:1]), otlp(*SPANS[1:])), OTEL_ROWS, OTEL_FIRST, 1),
    Sample("otel-genai-otlp-json", "spans.json", text(json.dumps(otlp(*SPANS), indent=2)), OTEL_ROWS, OTEL_FIRST, 1),
    Sample("otel-genai-parquet", "spans.parquet", otel_parquet, OTEL_ROWS, OTEL_FIRST, 1),
    Sample("otel-genai-clickhouse-parquet", "otel_traces.parquet", clickhouse_parquet, OTEL_ROWS, OTEL_FIRST, 1),
)  # fmt: skip
