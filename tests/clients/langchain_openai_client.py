"""LangChain's chat model and embeddings for OpenAI: calls, streams, structured output in its three methods, tools."""

import openai
from checks import BASE, MODEL, QUESTION, City, Trip, raises, run, weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def model(**options):
    return ChatOpenAI(**{"base_url": BASE, "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0,
                         "max_tokens": 12, "stream_usage": True, **options})


def calls_and_batches():
    answer = model().invoke(QUESTION)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert [a.content for a in model().batch([QUESTION, QUESTION])] == [answer.content] * 2


def streams():
    chunks = list(model().stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == model().invoke(QUESTION).content and whole.usage_metadata["output_tokens"] == 12


def structured(method, kind):
    answer = model(max_tokens=1500).with_structured_output(kind, method=method).invoke("Tell me of Paris, in JSON.")
    assert isinstance(answer, kind), answer


def structured_output_by_schema():
    structured("json_schema", City)
    structured("json_schema", Trip)


def structured_output_by_a_function():
    structured("function_calling", City)
    structured("function_calling", Trip)


def json_mode():
    bound = model(max_tokens=1500).bind(response_format={"type": "json_object"})
    answer = bound.invoke("Tell me of Paris, in JSON.")
    if answer.response_metadata["finish_reason"] == "stop":
        import json
        assert isinstance(json.loads(answer.content), dict)


def tools_of_all_choices():
    get = tool(weather)
    for choice in ("weather", "any", "required"):
        answer = model(max_tokens=1500).bind_tools([get], tool_choice=choice).invoke("Weather in Oslo?")
        assert [c["name"] for c in answer.tool_calls][:1] == ["weather"] and not answer.invalid_tool_calls, answer
        assert choice != "weather" or len(answer.tool_calls) == 1
        assert set(answer.tool_calls[0]["args"]) == {"city"}
    result = get.invoke(answer.tool_calls[0])
    assert isinstance(result, ToolMessage)
    results = [get.invoke(call) for call in answer.tool_calls]
    after = model().bind_tools([get]).invoke([HumanMessage("Weather in Oslo?"), answer, *results])
    assert after.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def streamed_tools():
    whole = None
    for chunk in model(max_tokens=1500).bind_tools([tool(weather)], tool_choice="weather").stream("Weather in Oslo?"):
        whole = chunk if whole is None else whole + chunk
    assert [c["name"] for c in whole.tool_calls] == ["weather"] and set(whole.tool_calls[0]["args"]) == {"city"}


def the_responses_api():
    answer = model(use_responses_api=True).invoke(QUESTION)
    assert answer.text
    whole = None
    for chunk in model(use_responses_api=True).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == answer.text
    got = model(use_responses_api=True, max_tokens=1500).with_structured_output(City, method="json_schema").invoke("Paris?")
    assert isinstance(got, City)


def a_custom_tool():
    from langchain_openai import custom_tool

    @custom_tool(format={"type": "grammar", "syntax": "regex", "definition": "[0-9]{3,5}"})
    def dial(number: str) -> str:
        """Dials a number."""
        return "ringing " + number

    bound = model(use_responses_api=True, max_tokens=200).bind_tools([dial], tool_choice={"type": "custom", "name": "dial"})
    answer = bound.invoke("Call 1234.")
    (call,) = answer.tool_calls
    number = call["args"]["__arg1"]
    assert call["name"] == "dial" and number.isdigit() and 3 <= len(number) <= 5, call
    after = model(use_responses_api=True).bind_tools([dial]).invoke([HumanMessage("Call 1234."), answer, dial.invoke(call)])
    assert after.usage_metadata["input_tokens"] > 0


def embeddings():
    vectors = OpenAIEmbeddings(base_url=BASE, api_key="none", model=MODEL, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(vectors) == 2 and len(vectors[0]) == 576


def errors():
    raises(openai.BadRequestError, lambda: model(temperature=9).invoke(QUESTION))
    raises(openai.NotFoundError, lambda: model(model="another").invoke(QUESTION))


run("langchain-openai", [calls_and_batches, streams, structured_output_by_schema, structured_output_by_a_function, json_mode,
                         tools_of_all_choices, streamed_tools, the_responses_api, a_custom_tool, embeddings, errors])
