"""What a client asks: the body of `/v1/completions` and `/v1/chat/completions`, checked. Pure."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import orjson

from picker_tools.simulator.refusal import Refusal

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions, here for chat too
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One checked request. `prompt` is all of its text; `finish_reason` is `length` or `stop`."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    finish_reason: str


def parse(body: bytes, *, chat: bool, models: Container[str]) -> Ask:
    """The request in `body`, for one of `models`. Keys that the simulation has no use for are ignored.

    Raises:
        Refusal: 400 for a malformed body, 404 for an unknown model; the message names the key.
    """
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as fault:
        raise Refusal(f"the body is not JSON: {fault}", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise Refusal("the body must be a JSON object", code="invalid_json")
    model = _model(tree, models)
    prompt, prompt_tokens = _messages(tree) if chat else _prompt(tree)
    limit = _limit(tree, "max_completion_tokens")
    if limit is None:
        limit = _limit(tree, "max_tokens")
    if tree.get("n") not in (None, 1):
        raise Refusal("n must be 1: one answer a request", param="n")
    stream = _flag(tree, "stream")
    options = tree.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise Refusal("stream_options must be an object", param="stream_options")
    return Ask(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        stream=stream,
        include_usage=options is not None and _flag(options, "include_usage"),
        # A chat without a limit is taken to have come to its own end; a completion's default is a limit.
        finish_reason="stop" if chat and limit is None else "length",
    )


def _model(tree: dict[str, Any], models: Container[str]) -> str:
    model = tree.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal("model must be a non-empty string", param="model")
    if model not in models:
        raise Refusal(
            f"the model {model[:100]!r} does not exist", status=404, code="model_not_found", param="model"
        )
    return model


def _limit(tree: dict[str, Any], key: str) -> int | None:
    value = tree.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refusal(f"{key} must be a whole number of at least 1", param=key)
    return value


def _flag(tree: dict[str, Any], key: str) -> bool:
    value = tree.get(key)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{key} must be true or false", param=key)
    return bool(value)


def _prompt(tree: dict[str, Any]) -> tuple[bytes, int]:
    """Text and tokens of `prompt`: a string, a list of one string, or a list of token ids."""
    prompt = tree.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0] if isinstance(prompt[0], str | list) else prompt
    if isinstance(prompt, str):
        return _counted(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return orjson.dumps(prompt), len(prompt)
    raise Refusal("prompt must be one string or one list of token ids", param="prompt")


def _messages(tree: dict[str, Any]) -> tuple[bytes, int]:
    """Text and tokens of `messages`; parts that are not text (images, tool calls) count nothing."""
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a non-empty list", param="messages")
    lines: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal("each of messages must be an object with a role", param="messages")
        lines.append(message["role"])
        content = message.get("content")
        if isinstance(content, str):
            lines.append(content)
        elif isinstance(content, list):
            lines.extend(_part_text(part) for part in content)
        elif content is not None:
            raise Refusal("content must be a string or a list of parts", param="messages")
    return _counted("\n".join(lines))


def _part_text(part: object) -> str:
    if not isinstance(part, dict):
        raise Refusal("each part of content must be an object", param="messages")
    text = part.get("text", "")
    if not isinstance(text, str):
        raise Refusal("text of a content part must be a string", param="messages")
    return text


def _counted(text: str) -> tuple[bytes, int]:
    prompt = text.encode()
    return prompt, max(1, len(prompt) // BYTES_PER_TOKEN)
