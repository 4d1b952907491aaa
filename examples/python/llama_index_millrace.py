"""MillraceLLM: a LlamaIndex chat model, and MillraceEmbedding beside it, over an engine in the same process.

    from llama_index_millrace import MillraceLLM

    model = MillraceLLM(millrace.LLM("model.gguf"), temperature=0)
    print(model.complete("Why is the sky blue?"))
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import millrace
from llama_index.core.base.llms.types import (ChatMessage, ChatResponse, ChatResponseAsyncGen, ChatResponseGen,
                                              CompletionResponse, CompletionResponseAsyncGen, CompletionResponseGen,
                                              LLMMetadata, MessageRole)
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms.llm import LLM
from pydantic import PrivateAttr


class MillraceLLM(LLM):
    """Chats go through the model's own template; completions are texts as they stand."""

    temperature: float = 0.0
    max_tokens: int = 256
    _llm: millrace.LLM = PrivateAttr()

    def __init__(self, llm: millrace.LLM, **fields: Any) -> None:
        super().__init__(**fields)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        return "MillraceLLM"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self._llm.info["context"], num_output=self.max_tokens, is_chat_model=True,
                           model_name=self._llm.info["name"])

    def _fields(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, **more}

    @staticmethod
    def _messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        return [{"role": message.role.value, "content": message.content or ""} for message in messages]

    # ---------------------------------------------------------------- chats

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        answer = self._llm.chat(self._messages(messages), **self._fields(kwargs))
        said = answer["choices"][0]["message"]
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=said["content"] or ""), raw=answer)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        def read() -> ChatResponseGen:
            text = ""
            for event in self._llm.stream(messages=self._messages(messages), **self._fields(kwargs)):
                if event.kind == "text":
                    text += event.text
                    yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=event.text)

        return read()

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        text = ""
        async for event in self._llm.stream(messages=self._messages(messages), **self._fields(kwargs)):
            text += event.text if event.kind == "text" else ""
        return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        async def read() -> ChatResponseAsyncGen:
            text = ""
            async for event in self._llm.stream(messages=self._messages(messages), **self._fields(kwargs)):
                if event.kind == "text":
                    text += event.text
                    yield ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=event.text)

        return read()

    # ---------------------------------------------------------------- completions

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self._llm.generate(prompt, **self._fields(kwargs))[0].text)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        def read() -> CompletionResponseGen:
            text = ""
            for event in self._llm.stream(prompt, **self._fields(kwargs)):
                if event.text:
                    text += event.text
                    yield CompletionResponse(text=text, delta=event.text)

        return read()

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        text = ""
        async for event in self._llm.stream(prompt, **self._fields(kwargs)):
            text += event.text
        return CompletionResponse(text=text)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        async def read() -> CompletionResponseAsyncGen:
            text = ""
            async for event in self._llm.stream(prompt, **self._fields(kwargs)):
                if event.text:
                    text += event.text
                    yield CompletionResponse(text=text, delta=event.text)

        return read()


class MillraceEmbedding(BaseEmbedding):
    """Vectors of length one, pooled as the model's makers do."""

    _llm: millrace.LLM = PrivateAttr()

    def __init__(self, llm: millrace.LLM, **fields: Any) -> None:
        super().__init__(model_name=llm.info["name"], **fields)
        self._llm = llm

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._llm.embed(text)[0].tolist()

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._llm.embed(texts).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)
