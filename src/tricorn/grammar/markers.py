"""The tokenizer as the grammar engine is to see it: markers have names that no text spells."""

from __future__ import annotations

from typing import Any

import msgspec


def hidden(tokenizer: str) -> str:
    """The JSON of a tokenizer with every marker renamed, so that the text of one, say in a schema's `const`, is cut
    into ordinary tokens, as the text of any message is. Ids, and which of them are markers, stay."""
    data: dict[str, Any] = msgspec.json.decode(tokenizer)
    added, model = data.get("added_tokens") or [], data["model"]
    names = {token["content"]: f"\U0010fffd{token['id']}" for token in added if token.get("special")}
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
    elif vocab is not None:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    data["post_processor"] = None  # it would name them; texts are never framed here
    return msgspec.json.encode(data).decode()
