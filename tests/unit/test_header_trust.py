"""Which request headers a client may set for itself."""

import pytest

from picker_fleet.config import parse
from picker_fleet.errors import ConfigError
from picker_fleet.header_trust import FAIRNESS_ID, NEVER_TRUSTED, OBJECTIVE, REWRITE, trusted, untrusted


def test_by_default_nothing_that_steers_is_taken_from_a_client() -> None:
    assert parse({}).extproc.trusted_headers == ()
    assert set(untrusted(())) == {*FAIRNESS_ID, *OBJECTIVE, *REWRITE, *NEVER_TRUSTED}


@pytest.mark.parametrize("named", [*FAIRNESS_ID, "X-Gateway-Inference-Fairness-Id"])
def test_both_spellings_of_a_header_are_trusted_together(named: str) -> None:
    names = parse({"extproc": {"trusted_headers": [named]}}).extproc.trusted_headers
    assert trusted(names) == frozenset(FAIRNESS_ID)
    assert set(untrusted(names)) == {*OBJECTIVE, *REWRITE, *NEVER_TRUSTED}


def test_a_header_that_is_kept_anyway_may_be_named() -> None:
    names = parse({"extproc": {"trusted_headers": ["x-workload-context"]}}).extproc.trusted_headers
    assert untrusted(names) == untrusted(())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x-gateway-destination-endpoint", "is never taken from a client"),
        ("x-request-id", "is no header that steers"),
        ("", "is no header that steers"),
        (7, "is no header that steers"),
    ],
)
def test_what_cannot_be_trusted_is_named(name: object, says: str) -> None:
    with pytest.raises(ConfigError, match=r"extproc\.trusted_headers\.0: ") as caught:
        parse({"extproc": {"trusted_headers": [name]}})
    assert says in str(caught.value)
    assert "valid: x-gateway-inference-fairness-id" in str(caught.value)
