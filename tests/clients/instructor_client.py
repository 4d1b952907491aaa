"""Instructor: Pydantic objects by each of its modes, lists of them, and objects that grow while they are streamed."""

import instructor
import openai
from checks import BASE, MODEL, City, Trip, raises, run

CLIENT = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)


def client(mode):
    return instructor.from_openai(CLIENT, mode=mode)


def ask(mode, kind, **options):
    return client(mode).chat.completions.create(**{
        "model": MODEL, "response_model": kind, "max_retries": 1, "max_tokens": 1500, "temperature": 0,
        "messages": [{"role": "user", "content": "Tell me of Paris."}], **options})


def tools_mode():
    assert isinstance(ask(instructor.Mode.TOOLS, City), City)
    assert isinstance(ask(instructor.Mode.TOOLS, Trip), Trip)


def strict_tools_mode():
    assert isinstance(ask(instructor.Mode.TOOLS_STRICT, City), City)


def json_schema_mode():
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA, City), City)
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA, Trip), Trip)


def partial_objects():
    seen = list(client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, response_model=City, max_tokens=1500, temperature=0, messages=[{"role": "user", "content": "Paris?"}]))
    assert len(seen) > 3 and isinstance(seen[-1].population, int)


def lists_of_objects():
    found = ask(instructor.Mode.TOOLS, list[City])
    assert all(isinstance(city, City) for city in found)


def errors():
    raises(Exception, lambda: ask(instructor.Mode.TOOLS, City, model="another"))


run("instructor", [tools_mode, strict_tools_mode, json_schema_mode, partial_objects, lists_of_objects, errors])
