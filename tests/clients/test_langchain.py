"""langchain-openai: chat, streams, structured output, tools, embeddings."""

from __future__ import annotations

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from served import Served


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    shade: int


@tool
def paint(colour: Literal["red", "blue"]) -> str:
    """Paints the wall."""
    return colour


def chat(server: Served, **more: object) -> ChatOpenAI:
    return ChatOpenAI(model="small", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_retries=0, **more)


def test_an_answer_and_its_stream(server: Served) -> None:
    model = chat(server, max_tokens=16)
    whole = model.invoke("Name a colour.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 16
    assert "".join(part.content for part in model.stream("Name a colour.")) == whole.content


def test_responses(server: Served) -> None:
    answer = chat(server, max_tokens=16, use_responses_api=True).invoke("Name a colour.")
    assert answer.text


def test_structured_output(server: Served) -> None:
    for method in ("json_schema", "function_calling"):
        found = chat(server, max_tokens=64).with_structured_output(Colour, method=method).invoke("Name a colour.")
        assert isinstance(found, Colour), method


def test_a_forced_tool(server: Served) -> None:
    answer = chat(server, max_tokens=64).bind_tools([paint], tool_choice="paint").invoke("Paint!")
    (call,) = answer.tool_calls
    assert call["name"] == "paint"
    assert call["args"]["colour"] in ("red", "blue")


def test_embeddings(server: Served) -> None:
    model = OpenAIEmbeddings(
        model="small", base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    documents = model.embed_documents(["The sky is blue.", "Snow is white."])
    assert [len(vector) for vector in documents] == [576, 576]
    assert model.embed_query("The sky is blue.") == documents[0]
