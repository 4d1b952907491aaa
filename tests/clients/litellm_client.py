"""LiteLLM as a library, with the openai/ prefix: calls, streams put together again, tools, schemas, its own errors."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no network but the server under test

import litellm
from checks import BASE, MODEL, QUESTION, City, raises, run

litellm.telemetry = False
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


def ask(**options):
    return litellm.completion(**{"model": "openai/" + MODEL, "api_base": BASE, "api_key": "none", "messages": MESSAGES,
                                 "temperature": 0, "max_tokens": 12, "num_retries": 0, **options})


def calls():
    assert ask().choices[0].message.content and ask().usage.completion_tokens == 12


def streams_are_put_together():
    whole = litellm.stream_chunk_builder(list(ask(stream=True)), messages=MESSAGES)
    assert whole.choices[0].message.content == ask().choices[0].message.content


def tools_named_and_required():
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        message = ask(tools=TOOLS, tool_choice=choice, max_tokens=1500).choices[0].message
        assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
    assert len(message.tool_calls) == 1
    chunks = list(ask(tools=TOOLS, tool_choice=choice, max_tokens=1500, stream=True))
    streamed = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message.tool_calls
    assert [c.function.arguments for c in streamed] == [c.function.arguments for c in message.tool_calls]


def schemas():
    City.model_validate_json(ask(response_format=City, max_tokens=1500).choices[0].message.content)


def the_responses_api():
    answer = litellm.responses(model="openai/" + MODEL, api_base=BASE, api_key="none", input=QUESTION, max_output_tokens=16)
    assert answer.output[-1].content[0].text


def embeddings():
    answer = litellm.embedding(model="openai/" + MODEL, api_base=BASE, api_key="none", input=["a", "b"])
    assert len(answer.data) == 2 and len(answer.data[0]["embedding"]) == 576


def errors():
    raises(litellm.BadRequestError, lambda: ask(temperature=9))
    raises(litellm.NotFoundError, lambda: ask(model="openai/another"))
    raises(litellm.ContextWindowExceededError, lambda: ask(messages=[{"role": "user", "content": "word " * 9000}]))


run("litellm", [calls, streams_are_put_together, tools_named_and_required, schemas, the_responses_api, embeddings, errors])
