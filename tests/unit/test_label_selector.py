"""Label selectors have the meaning that Kubernetes gives them."""

import pytest
from tables import cases

from picker_fleet.domain.label_selector import label_selector, selects

POD = {"llm-d.ai/role": "prefill", "gpu": "h100", "empty": ""}


@cases("text, selected", {
    "an equal value": ("gpu=h100", True),
    "an equal value by ==": ("gpu == h100", True),
    "another value": ("gpu=a100", False),
    "a prefix in the key": ("llm-d.ai/role=prefill", True),
    "no value": ("empty=", True),
    "no value where there is one": ("gpu=", False),
    "not this value": ("gpu!=h100", False),
    "not another value": ("gpu!=a100", True),
    "not a value of a missing label": ("zone!=a", True),
    "one of several": ("llm-d.ai/role in (prefill, prefill-decode)", True),
    "none of several": ("llm-d.ai/role in (decode,both)", False),
    "one of several for a missing label": ("zone in (a,b)", False),
    "not one of several": ("gpu notin (a100, l4)", True),
    "not one of several, yet it is": ("gpu notin (h100)", False),
    "not one of several for a missing label": ("zone notin (a)", True),
    "a label that is set": ("gpu", True),
    "a label that is not set": ("zone", False),
    "a label that must not be set": ("!zone", True),
    "a label that must not be set, yet is": ("! gpu", False),
    "all requirements": ("gpu=h100 , !zone,llm-d.ai/role in (prefill)", True),
    "all requirements but one": ("gpu=h100,zone", False),
    "a label named in": ("in", False),
})  # fmt: skip
def test_a_label_selector_selects_as_in_kubernetes(text: str, selected: bool) -> None:
    assert selects(label_selector(text), POD) is selected


HOSTILE = ("a in (b" + ", " * 60 + "!", "a=" + " " * 100_000 + "!")  # must not take hours


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "a=b,", "a=b c=d", "a in b", "a in (b", "a in (b,c) d", "a ! b", "a=(b)", "-a", "a=-b",
     "!a=b", "a>1", *HOSTILE, "UPPER.case/a=b", "a in (b;c)", "é=b"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_the_refusal_of_an_invalid_label_selector_names_the_place_of_the_fault(text: str) -> None:
    with pytest.raises(ValueError, match="no label selector at"):
        label_selector(text)
