"""Parses and checks bodies of `/v1/completions` and `/v1/chat/completions`; the API's errors. Pure."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import orjson

from picker_fleet.domain.errors import PickerError


class ApiError(PickerError):
    """An error in OpenAI's format: HTTP status, type, code, and the invalid parameter."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "bad_request",
        kind: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param

    @property
    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
        )


DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions, used here for chat too
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request. `prompt` is the request's whole text; `finish_reason` is `length` or `stop`."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    finish_reason: str


def parse(body: bytes, *, chat: bool, models: Container[str]) -> CompletionRequest:
    """Parse the request in `body`, which must name one of `models`. Ignore keys that the simulator lacks.

    Raises:
        ApiError: 400 for a malformed body, 404 for an unknown model; the message names the key.
    """
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as fault:
        raise ApiError(f"the body is not JSON: {fault}", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    model = _model(tree, models)
    prompt, prompt_tokens = _messages(tree) if chat else _prompt(tree)
    limit = _limit(tree, "max_completion_tokens")
    if limit is None:
        limit = _limit(tree, "max_tokens")
    if tree.get("n") not in (None, 1):
        raise ApiError("n must be 1: one answer a request", param="n")
    stream = _flag(tree, "stream")
    options = tree.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError("stream_options must be an object", param="stream_options")
    return CompletionRequest(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        stream=stream,
        include_usage=options is not None and _flag(options, "include_usage"),
        # A chat without a limit stops by itself; a completion always has a limit, the default.
        finish_reason="stop" if chat and limit is None else "length",
    )


def _model(tree: dict[str, Any], models: Container[str]) -> str:
    model = tree.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError("model must be a non-empty string", param="model")
    if model not in models:
        raise ApiError(
            f"the model {model[:100]!r} does not exist", status=404, code="model_not_found", param="model"
        )
    return model


def _limit(tree: dict[str, Any], key: str) -> int | None:
    value = tree.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ApiError(f"{key} must be a whole number of at least 1", param=key)
    return value


def _flag(tree: dict[str, Any], key: str) -> bool:
    value = tree.get(key)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{key} must be true or false", param=key)
    return bool(value)


def _prompt(tree: dict[str, Any]) -> tuple[bytes, int]:
    """Text and token count of `prompt`: a string, a list of one string, or a list of token ids."""
    prompt = tree.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0] if isinstance(prompt[0], str | list) else prompt
    if isinstance(prompt, str):
        return _counted(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return orjson.dumps(prompt), len(prompt)
    raise ApiError("prompt must be one string or one list of token ids", param="prompt")


def _messages(tree: dict[str, Any]) -> tuple[bytes, int]:
    """Text and token count of `messages`; parts without text (images, tool calls) add no tokens."""
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a non-empty list", param="messages")
    lines: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError("each of messages must be an object with a role", param="messages")
        lines.append(message["role"])
        content = message.get("content")
        if isinstance(content, str):
            lines.append(content)
        elif isinstance(content, list):
            lines.extend(_part_text(part) for part in content)
        elif content is not None:
            raise ApiError("content must be a string or a list of parts", param="messages")
    return _counted("\n".join(lines))


def _part_text(part: object) -> str:
    if not isinstance(part, dict):
        raise ApiError("each part of content must be an object", param="messages")
    text = part.get("text", "")
    if not isinstance(text, str):
        raise ApiError("text of a content part must be a string", param="messages")
    return text


def _counted(text: str) -> tuple[bytes, int]:
    prompt = text.encode()
    return prompt, max(1, len(prompt) // BYTES_PER_TOKEN)
