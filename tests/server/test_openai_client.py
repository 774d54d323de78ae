"""The ``openai`` package against a real server with a real engine: uvicorn, compiled steps, a small random model."""

from __future__ import annotations

import concurrent.futures
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import live_server
from small_models import small_config

from dspark_jax.checkpoint import build_checkpoint
from dspark_jax.config import EngineConfig
from dspark_jax.engine.async_engine import AsyncEngine
from dspark_jax.engine.build import build_engine
from dspark_jax.server.app import create_app
from dspark_jax.text.byte_tokenizer import write_byte_tokenizer

MODEL = "small-random"
QUESTION = [{"role": "user", "content": "Is the sky blue?"}]
# Most tokens of the small vocabulary are bytes; without end token and with a seed every answer is long and repeatable.
LONG = {"max_tokens": 40, "seed": 3, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    path = build_checkpoint(tmp_path_factory.mktemp("served"), small_config(), seed=1)
    write_byte_tokenizer(path, 320)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, decode_buckets=(4,))
    return build_engine(path, config, progress=False)


@pytest.fixture(scope="module")
def url(core):
    engine, tokenizer = core
    app = create_app(AsyncEngine(engine, max_running=4, max_waiting=16), tokenizer, MODEL)
    with live_server(app) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client, **options):
    return client.chat.completions.create(model=MODEL, messages=QUESTION, **{**LONG, **options})


def streamed_text(stream):
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason is not None
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks


def wait_idle(core, seconds=10):
    deadline = time.monotonic() + seconds
    while (counters := core[0].counters())["running"] or counters["waiting"]:
        assert time.monotonic() < deadline, counters
        time.sleep(0.02)
    assert counters["free_pages"] == counters["total_pages"]


def test_models_and_health(client, url):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert httpx.get(f"{url}/health").status_code == 200


def scrape(url):
    """Samples of ``/metrics`` by name, with the labels that they have."""
    response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert all(family.documentation for family in families)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics_and_cached_tokens(client, url, core):
    wait_idle(core)
    before = scrape(url)
    prompt = "All work and no play. " * 15
    usages = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, seed=1, extra_body={"ignore_eos": True})
        for _ in range(2)
    ]
    cached = [usage.usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached == [0, 256]
    assert usages[0].choices[0].text == usages[1].choices[0].text
    wait_idle(core)
    after = scrape(url)
    grown = {key: value - before[key] for key, value in after.items()}
    assert grown["dspark_jax_prefix_hits_total",] == 1
    assert grown["dspark_jax_prefix_hit_tokens_total",] == 256
    assert grown["dspark_jax_prefix_query_tokens_total",] == 2 * len(prompt)
    assert grown["dspark_jax_generated_tokens_total",] == 16
    assert after["dspark_jax_compiles_after_ready_total",] == 0
    assert after["dspark_jax_compiled_programs",] == core[0].runner.num_programs > 0
    assert after["dspark_jax_running",] == after["dspark_jax_waiting",] == after["dspark_jax_in_flight",] == 0
    accepted = [after["dspark_jax_accepted_rounds_total", str(k)] for k in (1, 2, 3)]
    assert accepted == sorted(accepted, reverse=True)


def test_chat_whole_and_streamed(client):
    answer = chat(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40
    text, chunks = streamed_text(chat(client, stream=True))
    assert text == answer.choices[0].message.content
    assert text
    assert len(chunks) > 5


def test_seed_makes_answers_repeatable(client):
    texts = [chat(client, seed=seed).choices[0].message.content for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    greedy = {chat(client, temperature=0, seed=seed).choices[0].message.content for seed in (1, 2)}
    assert len(greedy) == 1


def test_stop_strings_end_the_text_before_them(client):
    full = chat(client).choices[0].message.content
    stop = full[len(full) // 2 : len(full) // 2 + 3]
    want = full[: full.index(stop)]
    answer = chat(client, stop=[stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (want, "stop")
    assert answer.usage.completion_tokens < 40
    text, chunks = streamed_text(chat(client, stop=stop, stream=True))
    assert (text, chunks[-1].choices[0].finish_reason) == (want, "stop")


def test_max_tokens_and_usage_in_a_stream(client):
    chunks = list(chat(client, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"


def test_completions_with_several_choices(client):
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, **LONG)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage.completion_tokens == 160


def test_two_clients_at_once_get_what_each_gets_alone(client):
    alone = [chat(client, seed=seed).choices[0].message.content for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        streams = pool.map(lambda seed: streamed_text(chat(client, seed=seed, stream=True))[0], range(6))
        assert list(streams) == alone


def test_a_client_that_leaves_frees_its_request(client, core):
    stream = chat(client, max_tokens=400, stream=True)
    next(iter(stream))
    assert core[0].counters()["running"] == 1
    stream.close()
    wait_idle(core)
    assert chat(client, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("options", "error", "parameter"),
    [
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 999}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"messages": [{"role": "king", "content": "hi"}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 200}]}, openai.BadRequestError, "messages"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"reasoning_effort": "extreme"}, openai.BadRequestError, "reasoning_effort"),
    ],
)
def test_bad_requests_are_refused_and_the_server_lives_on(client, core, options, error, parameter):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **options})
    assert caught.value.body["param"] == parameter
    wait_idle(core)
    assert chat(client, max_tokens=2).usage.completion_tokens == 2


def test_thinking_is_a_channel_of_its_own(client):
    answer = chat(client, extra_body={"ignore_eos": True, "thinking": {"type": "enabled"}})
    message = answer.choices[0].message
    assert message.reasoning_content  # a random model hardly ever closes its thought
    assert "</think>" not in message.reasoning_content
