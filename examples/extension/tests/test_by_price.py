"""Run `pytest` in this folder, in an environment with picker-fleet."""

import pytest
from picker_by_price import EXTENSION, Parameters
from pydantic import ValidationError

from picker_fleet.extensions import EndpointState, PickRequest


def test_an_endpoint_of_twice_the_price_gets_half_the_score() -> None:
    prices = {"10.0.0.1:8000": {"price": "2"}, "10.0.0.2:8000": {"price": "4"}, "10.0.0.3:8000": {}}
    endpoints = [EndpointState(address, labels=labels) for address, labels in prices.items()]
    by_price = EXTENSION.make(Parameters(otherwise=8))
    assert list(by_price(PickRequest(), endpoints)) == [1.0, 0.5, 0.25]


def test_the_parameter_otherwise_must_be_greater_than_0() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        Parameters(otherwise=0)
