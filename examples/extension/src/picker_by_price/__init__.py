"""The scorer `by-price`: a label has each endpoint's price, and the cheapest endpoint gets the score 1."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, Field

from picker_fleet.extensions import EndpointState, Extension, PickRequest, Scorer


class Parameters(BaseModel, extra="forbid"):
    """`label` names the label that has the price; `otherwise` is the price of endpoints without the label."""

    label: str = "price"
    otherwise: Annotated[float, Field(gt=0)]


def make(parameters: Parameters) -> Scorer:
    def price_of(endpoint: EndpointState) -> float:
        try:
            price = float(endpoint.labels.get(parameters.label, ""))
        except ValueError:
            return parameters.otherwise
        return price if price > 0 else parameters.otherwise

    def by_price(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
        prices = [price_of(candidate) for candidate in candidates]
        return [min(prices) / price for price in prices]

    return by_price


EXTENSION = Extension(version=1, make=make, parameters=Parameters)
