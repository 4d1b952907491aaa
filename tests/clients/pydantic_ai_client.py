"""Pydantic AI: typed results by a tool, by a schema and by a prompt; runs with a tool and a typed result; streams."""

import asyncio

from checks import BASE, MODEL, QUESTION, City, Trip, raises, run, weather
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits


def agent(kind=OpenAIChatModel, name=MODEL, max_tokens=1500, **options):
    model = kind(name, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    return Agent(model, model_settings=ModelSettings(temperature=0, max_tokens=max_tokens), retries=3, **options)


def plain_runs():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert agent(kind, max_tokens=24).run_sync(QUESTION).output


def typed_results_by_a_tool():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert isinstance(agent(kind, output_type=City).run_sync("Tell me of Paris.").output, City)
    assert isinstance(agent(output_type=ToolOutput(Trip, strict=True)).run_sync("A trip?").output, Trip)


def typed_results_by_a_schema():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert isinstance(agent(kind, output_type=NativeOutput(City)).run_sync("Tell me of Paris.").output, City)


def a_tool_and_a_typed_result():
    """The run that used to hang. A small model may choose the tool again and again; the run has to end all the same."""
    called = []

    def counted(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return weather(city)

    result = agent(output_type=City, tools=[counted]).run_sync("Weather in Oslo?", usage_limits=UsageLimits(request_limit=12))
    assert isinstance(result.output, City)


def one_of_two_types():
    made = agent(output_type=[City, Trip]).run_sync("Tell me of Paris.").output
    assert isinstance(made, (City, Trip))


def streams():
    async def check():
        async with agent(max_tokens=24).run_stream(QUESTION) as result:
            text = [piece async for piece in result.stream_text(delta=True)]
        assert text
        async with agent(output_type=City).run_stream("Tell me of Paris.") as result:
            partial = [one async for one in result.stream_output(debounce_by=None)]
        assert isinstance(partial[-1], City)

    asyncio.run(check())


def errors():
    assert raises(ModelHTTPError, lambda: agent(name="another").run_sync(QUESTION)).status_code == 404


run("pydantic-ai-slim", [plain_runs, typed_results_by_a_tool, typed_results_by_a_schema, a_tool_and_a_typed_result,
                         one_of_two_types, streams, errors])
