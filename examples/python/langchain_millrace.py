"""ChatMillrace: a LangChain chat model over an engine in the same process.

    from langchain_millrace import ChatMillrace

    model = ChatMillrace(llm=millrace.LLM("model.gguf"), temperature=0)
    print(model.invoke("Why is the sky blue?").content)
    structured = model.with_structured_output(schema)     # held to it while it is generated
    with_tools = model.bind_tools([weather])
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import millrace
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict


class ChatMillrace(BaseChatModel):
    """A chat model; fields of llm.chat that every call shall have go into `chat_fields` or stand by themselves."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llm: millrace.LLM
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    chat_fields: dict[str, Any] = {}

    @property
    def _llm_type(self) -> str:
        return "millrace"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"model": self.llm.info["name"], "temperature": self.temperature, "seed": self.seed}

    def _fields(self, stop: list[str] | None, more: dict[str, Any]) -> dict[str, Any]:
        fields = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed, **self.chat_fields, **more}
        return fields if stop is None else {**fields, "stop": stop}

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None,
                  run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> ChatResult:
        answer = self.llm.chat(convert_to_openai_messages(messages), **self._fields(stop, kwargs))
        generations = []
        for choice in answer["choices"]:
            said = choice["message"]
            calls = [{"name": call["function"]["name"], "args": json.loads(call["function"]["arguments"] or "{}"), "id": call["id"]}
                     for call in said.get("tool_calls") or ()]
            more = {"reasoning_content": said["reasoning"]} if said.get("reasoning") else {}
            message = AIMessage(content=said["content"] or "", tool_calls=calls, additional_kwargs=more,
                                usage_metadata=_usage(answer["usage"]),
                                response_metadata={"finish_reason": choice["finish_reason"], "model_name": answer["model"]})
            generations.append(ChatGeneration(message=message))
        return ChatResult(generations=generations)

    def _stream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        for event in self.llm.stream(messages=convert_to_openai_messages(messages), **self._fields(stop, kwargs)):
            chunk = _chunk(event)
            if run_manager:
                run_manager.on_llm_new_token(event.text, chunk=chunk)
            yield chunk

    async def _astream(self, messages: list[BaseMessage], stop: list[str] | None = None,
                       run_manager: AsyncCallbackManagerForLLMRun | None = None,
                       **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        async for event in self.llm.stream(messages=convert_to_openai_messages(messages), **self._fields(stop, kwargs)):
            chunk = _chunk(event)
            if run_manager:
                await run_manager.on_llm_new_token(event.text, chunk=chunk)
            yield chunk

    def bind_tools(self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], *,
                   tool_choice: str | None = None, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Tools as functions, classes or dicts; `tool_choice`: auto, none, required ("any"), or the name of one."""
        if tool_choice is not None:
            named: Any = {"type": "function", "function": {"name": tool_choice}}
            kwargs["tool_choice"] = {"any": "required", "auto": "auto", "none": "none", "required": "required"}.get(tool_choice, named)
        return super().bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **kwargs: Any) -> Runnable[LanguageModelInput, Any]:
        """The answer as an object of this schema: a pydantic class, or a JSON schema for a dict."""
        if include_raw:
            raise NotImplementedError("include_raw: is not supported; bind response_format and read the message")
        is_class = isinstance(schema, type) and issubclass(schema, BaseModel)
        plain = schema.model_json_schema() if is_class else schema
        bound = self.bind(response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": plain}}, **kwargs)
        read = schema.model_validate_json if is_class else json.loads
        return bound | RunnableLambda(lambda message: read(message.content))


def _usage(usage: Mapping[str, Any]) -> UsageMetadata:
    return UsageMetadata(input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"],
                         total_tokens=usage["total_tokens"])


def _chunk(event: millrace.StreamEvent) -> ChatGenerationChunk:
    if event.kind == "finish":
        message = AIMessageChunk(content="", response_metadata={"finish_reason": event.finish_reason},
                                 usage_metadata=_usage(event.usage) if event.usage else None)
    elif event.kind == "tool_call" and event.tool_call is not None:
        call = event.tool_call
        message = AIMessageChunk(content="", tool_call_chunks=[
            {"name": call.name, "args": call.arguments, "id": call.id, "index": call.index, "type": "tool_call_chunk"}])
    elif event.kind == "reasoning":
        message = AIMessageChunk(content="", additional_kwargs={"reasoning_content": event.text})
    else:
        message = AIMessageChunk(content=event.text)
    return ChatGenerationChunk(message=message)
