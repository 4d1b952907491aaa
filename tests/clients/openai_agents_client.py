"""OpenAI's Agents SDK, over both APIs: runs with tools, with a typed result, streamed; one agent handing over to another."""

import asyncio

import agents
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from checks import BASE, MODEL, QUESTION, City, run, weather
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
TOOL = function_tool(weather)


def both(check):
    """check(model) with a model over each API, each with a client of its own loop."""
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        async def once():
            client = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
            await check(kind(model=MODEL, openai_client=client))
            await client.close()

        asyncio.run(once())


def settings(**options):
    return ModelSettings(**{"temperature": 0, "max_tokens": 1500, **options})


def plain_runs():
    async def check(model):
        result = await Runner.run(Agent(name="a", instructions="Be brief.", model=model, model_settings=settings(max_tokens=12)), QUESTION)
        assert isinstance(result.final_output, str) and result.final_output

    both(check)


def typed_results():
    async def check(model):
        result = await Runner.run(Agent(name="a", model=model, output_type=City, model_settings=settings()), "Tell me of Paris.")
        assert isinstance(result.final_output, City)

    both(check)


def a_tool_then_an_answer():
    async def check(model):
        agent = Agent(name="a", model=model, tools=[TOOL], model_settings=settings(tool_choice="weather", max_tokens=300))
        result = await Runner.run(agent, "Weather in Oslo?", max_turns=3)
        kinds = [item.type for item in result.new_items]
        assert kinds.count("tool_call_item") == 1 and kinds.count("tool_call_output_item") == 1, kinds
        assert isinstance(result.final_output, str)

    both(check)


def a_tool_then_a_typed_result():
    async def check(model):
        agent = Agent(name="a", model=model, tools=[TOOL], output_type=City, model_settings=settings(tool_choice="required"))
        try:
            result = await Runner.run(agent, "Weather in Oslo?", max_turns=4)
            assert isinstance(result.final_output, City)
        except agents.MaxTurnsExceeded:
            pass  # a small model likes to call the tool again; each turn ended

    both(check)


def streamed_runs():
    async def check(model):
        agent = Agent(name="a", model=model, tools=[TOOL], model_settings=settings(tool_choice="required", max_tokens=300))
        result = Runner.run_streamed(agent, "Weather in Oslo?", max_turns=4)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert names[0] == "tool_called" and "tool_output" in names, names
        assert isinstance(result.final_output, str)

    both(check)


def handing_over():
    async def check(model):
        poet = Agent(name="poet", model=model, model_settings=settings(max_tokens=24))
        clerk = Agent(name="clerk", model=model, handoffs=[poet], model_settings=settings(tool_choice="transfer_to_poet"))
        result = await Runner.run(clerk, "A poem, please.", max_turns=4)
        assert result.last_agent is poet and isinstance(result.final_output, str)

    both(check)


run("openai-agents", [plain_runs, typed_results, a_tool_then_an_answer, a_tool_then_a_typed_result, streamed_runs, handing_over])
