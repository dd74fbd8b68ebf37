"""instructor: pydantic models out of a small model, which only a constraint that holds can give."""

from __future__ import annotations

from typing import Annotated, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, Field

from served import Served


class Review(BaseModel):
    """A review of a change."""

    verdict: Literal["approve", "reject"]
    risk: int = Field(ge=1, le=5)
    reasons: list[Annotated[str, Field(max_length=60)]] = Field(min_length=1, max_length=2)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT])
def test_a_model(server: Served, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"), mode=mode)
    review = client.chat.completions.create(
        model="small",
        response_model=Review,
        messages=[{"role": "user", "content": "Review: the cache is never emptied."}],
        max_retries=0,
        max_tokens=400,
        temperature=0,
    )
    assert review.verdict in ("approve", "reject")
    assert 1 <= review.risk <= 5
    assert 1 <= len(review.reasons) <= 2
