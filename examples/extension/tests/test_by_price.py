"""Run in this folder, with picker-fleet installed: `pytest`."""

import pytest
from picker_by_price import EXTENSION, Parameters
from pydantic import ValidationError

from picker_fleet.extensions import EndpointState, PickRequest


def test_half_the_score_goes_to_an_endpoint_of_twice_the_price() -> None:
    prices = {"10.0.0.1:8000": {"price": "2"}, "10.0.0.2:8000": {"price": "4"}, "10.0.0.3:8000": {}}
    endpoints = [EndpointState(address, labels=labels) for address, labels in prices.items()]
    by_price = EXTENSION.make(Parameters(otherwise=8))
    assert list(by_price(PickRequest(), endpoints)) == [1.0, 0.5, 0.25]


def test_a_price_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        Parameters(otherwise=0)
