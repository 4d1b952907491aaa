"""LlamaIndex's client for servers like OpenAI's: text and chat, streams, typed answers, a chosen tool."""

from checks import BASE, MODEL, QUESTION, City, run, weather
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(**options):
    return OpenAILike(**{"api_base": BASE, "api_key": "none", "model": MODEL, "is_chat_model": True, "temperature": 0,
                         "is_function_calling_model": True, "max_tokens": 24, "max_retries": 0, "timeout": 600, "context_window": 2048, **options})


def text_and_chat():
    assert model(is_chat_model=False).complete("One two three").text
    assert model().chat([ChatMessage(QUESTION)]).message.content


def streams():
    pieces = list(model().stream_chat([ChatMessage(QUESTION)]))
    assert pieces[-1].message.content == model().chat([ChatMessage(QUESTION)]).message.content
    assert "".join(p.delta for p in pieces) == pieces[-1].message.content


def typed_answers():
    asked = PromptTemplate("Tell me of {town}.")
    assert isinstance(model(max_tokens=1500).structured_predict(City, asked, town="Paris"), City)
    made = model(max_tokens=1500, should_use_structured_outputs=True).as_structured_llm(City).chat([ChatMessage("Paris?")])
    assert isinstance(made.raw, City)


def a_chosen_tool():
    tool = FunctionTool.from_defaults(weather)
    llm = model(max_tokens=1500)
    answer = llm.chat_with_tools([tool], user_msg="Weather in Oslo?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls and set(calls[0].tool_kwargs) == {"city"}
    done = llm.predict_and_call([tool], user_msg="Weather in Oslo?", tool_required=True)
    assert "sunny" in str(done)


run("llama-index-llms-openai-like", [text_and_chat, streams, typed_answers, a_chosen_tool])
