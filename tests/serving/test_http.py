"""OpenAI's API over real HTTP: answers, streams, limits, errors, disconnects."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

PROMPT = "The quick brown fox jumps over the lazy dog"


def ask(served: Any, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    with served.client() as client:
        return client.post(path, json={"model": "tiny", **body})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def stream(served: Any, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, without the closing [DONE], which must be there."""
    with (
        served.client() as client,
        client.stream("POST", path, json={"model": "tiny", "stream": True, **body}) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(events: list[dict[str, Any]]) -> str:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


def until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def test_a_completion_counts_its_tokens(served: Any) -> None:
    answer = ask(served, prompt=PROMPT, max_tokens=12, temperature=0, ignore_eos=True).json()
    prompt_tokens = len(served.live.text.encode(PROMPT))
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == prompt_tokens + 12


def test_token_ids_and_text_are_the_same_prompt(served: Any) -> None:
    ids = list(served.live.text.encode(PROMPT))
    body = {"max_tokens": 10, "temperature": 0}
    texts = {text_of(ask(served, prompt=prompt, **body)) for prompt in (PROMPT, [PROMPT], ids, [ids])}
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_stream_equals_the_whole_answer(served: Any, temperature: float) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": temperature, "seed": 5, "ignore_eos": True}
    whole = ask(served, **body)
    events = stream(served, stream_options={"include_usage": True}, **body)
    assert joined(events) == text_of(whole)
    assert events[-1]["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert len({e["id"] for e in events}) == 1


def test_a_chat_is_chatml_and_streams_the_same(served: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    body = {"messages": messages, "max_completion_tokens": 16, "temperature": 0}
    whole = ask(served, "/v1/chat/completions", **body)
    raw = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(whole) == text_of(ask(served, prompt=raw, max_tokens=16, temperature=0))
    events = stream(served, "/v1/chat/completions", **body)
    assert joined(events) == text_of(whole)
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_markers_in_a_chat_message_are_text(served: Any) -> None:
    ids = served.live.text.chat([("user", "<|im_end|>")])
    end = served.live.text.encode("<|im_end|>")
    assert len(end) == 1 and ids.count(end[0]) == 1


def test_a_seed_decides_and_the_neighbours_do_not(served: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    alone = text_of(ask(served, seed=7, **body))
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda seed: text_of(ask(served, seed=seed, **body)), [7, 1, 2, 7, 3, 4, 5, 6]))
    assert texts[0] == texts[3] == alone
    assert len(set(texts)) == 7
    assert text_of(ask(served, **body)) != text_of(ask(served, **body))  # without a seed each draws its own


def test_eight_streams_at_once_each_get_their_own_answer(served: Any) -> None:
    prompts = [f"{word} {PROMPT}" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    serial = [text_of(ask(served, prompt=prompt, **body)) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: joined(stream(served, prompt=prompt, **body)), prompts))
    assert together == serial
    assert served.blocks_held == 0


def test_a_stop_string_cuts_and_ends_the_request(served: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = text_of(ask(served, **body))
    stop = whole[20:23]
    cut = ask(served, stop=[stop, "never there"], **body)
    assert text_of(cut) == whole[: whole.index(stop)]
    assert cut.json()["choices"][0]["finish_reason"] == "stop"
    assert cut.json()["usage"]["completion_tokens"] < 60
    assert joined(stream(served, stop=stop, **body)) == text_of(cut)
    until(lambda: served.blocks_held == 0)


def test_a_shared_prompt_comes_from_the_prefix_cache(served: Any) -> None:
    prompt = "A long system prompt that two requests share. " * 2
    ask(served, prompt=prompt, max_tokens=1)
    cached = ask(served, prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 16 and cached % 8 == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_a_disconnect_aborts_and_frees(served: Any, streaming: bool) -> None:
    aborted = served.live.counters.abort
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 150,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streaming,
    }
    if streaming:
        with served.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept: the response closes with its iterator
            next(lines)
            assert served.blocks_held > 0
    else:
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.url, timeout=0.03) as client:
            client.post("/v1/completions", json=body)
    until(lambda: served.live.counters.abort == aborted + 1)
    until(lambda: served.blocks_held == 0)
    assert served.traffic.rows[-1]["finish_reason"] == "abort"
    assert served.traffic.rows[-1]["output_tokens"] < 150


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [999999]}, "token id"),
    ({"prompt": [-1]}, "token id"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": "x", "n": 2}, "n"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 100000}, "context"),
    ({"prompt": "x " * 300}, "context"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "top_p": 1.5}, "top_p"),
    ({"prompt": "x", "seed": 2**70}, "seed"),
    ({"prompt": "x", "stop": ["a"] * 5}, "stop"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "logprobs": 3}, "logprobs"),
    ({"prompt": "x", "echo": True}, "echo"),
    ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty"),
    ({"prompt": "x", "no_such_parameter": 1}, "no_such_parameter"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream"),
]


@pytest.mark.parametrize(("body", "word"), BAD, ids=[json.dumps(body)[:40] for body, _ in BAD])
def test_bad_input_is_a_400_in_openais_shape_that_names_it(served: Any, body: dict[str, Any], word: str) -> None:
    answer = ask(served, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"] and "\n" not in error["message"]
    assert served.live.counters.failed == 0


def test_other_errors_have_the_same_shape(served: Any) -> None:
    with served.client() as client:
        broken = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        nowhere = client.get("/v1/nothing")
        unknown = client.post("/v1/completions", json={"model": "other", "prompt": "x"})
        empty_chat = client.post("/v1/chat/completions", json={"model": "tiny", "messages": []})
    assert (broken.status_code, nowhere.status_code, unknown.status_code, empty_chat.status_code) == (
        400,
        404,
        404,
        400,
    )
    assert broken.json()["error"]["message"] == "the body is not JSON"
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert nowhere.json()["error"]["type"] == "invalid_request_error"


def test_models_version_health_and_metrics_tell_the_truth(served: Any) -> None:
    with served.client() as client:
        models, version = client.get("/v1/models").json(), client.get("/version").json()
        health, metrics = client.get("/health"), client.get("/metrics").text
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert version["forward"] == served.live.loop.current and len(version["forward"]) == 64
    assert version["weights_sha256"] == served.workers.weights_sha256
    assert version["launch"] == "tideforge serve --endpoint tiny.yaml"
    assert version["environment"]["precision"] == "float32" and version["release"] == ""
    assert health.json() == {"status": "ok"}
    figures = dict(line.rsplit(" ", 1) for line in metrics.splitlines())
    assert int(figures["tideforge_requests_failed_total"]) == 0
    assert int(figures["tideforge_tokens_total"]) > 0


def test_the_log_has_lengths_times_and_prefix_hashes_but_no_text(served: Any) -> None:
    prompt = "Twenty or more tokens are needed for two full blocks of eight."
    ask(served, prompt=prompt, max_tokens=5, temperature=0, ignore_eos=True, user="alice")
    ask(served, prompt=prompt + " And more.", max_tokens=5, temperature=0, ignore_eos=True)
    until(lambda: len(served.traffic.rows) >= 2)
    first, second = served.traffic.rows[-2:]
    assert first["prompt_tokens"] == len(served.live.text.encode(prompt)) and first["output_tokens"] == 5
    assert 0 < first["ttft_ms"] <= first["latency_ms"]
    assert first["tenant"] == "alice" and first["finish_reason"] == "length"
    assert len(first["prefix_hashes"]) == first["prompt_tokens"] // 8
    shared = len(first["prefix_hashes"]) - 1
    assert second["prefix_hashes"][:shared] == first["prefix_hashes"][:shared]
    assert "prompt_text" not in first and "output_text" not in first


def test_text_is_logged_only_where_the_endpoint_keeps_it(serve_at: Any, tmp_path: Any) -> None:
    with serve_at(tmp_path, keep_text=True) as served:
        text = text_of(ask(served, prompt=PROMPT, max_tokens=5, temperature=0))
        until(lambda: served.traffic.rows)
    assert served.traffic.rows[0]["prompt_text"] == PROMPT and served.traffic.rows[0]["output_text"] == text
