"""The sections of the settings tree that say how a replica is watched: its logs and traces."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from picker_fleet.sections import Section
from picker_fleet.units import Flag, Number, starting_with


class Logging(Section):
    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # DEBUG has a line for each decision


class Tracing(Section):
    """OpenTelemetry spans of requests; needs `picker-fleet[tracing]`."""

    enabled: Flag = False
    endpoint: Annotated[str, AfterValidator(starting_with("http://", "https://"))] = "http://127.0.0.1:4317"
    sample: Number = Field(0.1, ge=0, le=1)  # of requests without a traceparent; others bring its word
