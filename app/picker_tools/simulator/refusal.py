"""A request the simulated server does not answer with tokens."""

import orjson

from picker_fleet.errors import PickerError


class Refusal(PickerError):
    """An answer in OpenAI's error shape: HTTP status, type, code, and the parameter at fault."""

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
