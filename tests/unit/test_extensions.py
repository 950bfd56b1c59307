"""Extensions: how they are found and checked, what they change, and what happens if they fail."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from choosers import chooser_of
from extension_folder import IMPORTS, installed_in, scorers
from local_requests import ask
from tables import cases

from picker_fleet import cli
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError, StartupError
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Endpoint, Placement
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.fleet import live_config
from picker_fleet.ingress.intake import Intake, read_body
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.extension_calls import Calls, Extensions
from picker_fleet.scheduling.scheduler import FILTERS
from picker_fleet.state.accounting_token import Keyring

A, B, C = (f"10.0.0.{i}:8000" for i in (1, 2, 3))
# Sources of two scorers, of which `second` prefers all endpoints except the first, and `raises` fails.
SCORERS = scorers({
    "second": "return [0.0, *[1.0] * (len(candidates) - 1)]",
    "raises": "raise RuntimeError('no such rack')",
})  # fmt: skip
GOOD = {"second": "EXTENSION_second", "raises": "EXTENSION_raises"}
PARAMETERS = (
    IMPORTS
    + """
class Parameters(BaseModel, extra="forbid"):
    rack: str
    most: int = 3

def make(parameters):
    return lambda pick, candidates: [float(each.labels["rack"] == parameters.rack) for each in candidates]

EXTENSION = Extension(version=1, make=make, parameters=Parameters)
OLD = Extension(version=0, make=make, parameters=Parameters)
class Broken(BaseModel):
    def model_post_init(self, context):
        raise KeyError("rack 7")
BROKEN = Extension(version=1, make=make, parameters=Broken)
def fail(parameters):
    raise OSError("no table of racks")
FAILS = Extension(version=1, make=fail, parameters=NoParameters)
FORGETS = Extension(version=1, make=lambda parameters: None, parameters=NoParameters)
"""
)
FILTER = (
    IMPORTS
    + """
def make(parameters):
    return lambda pick, endpoints: [
        None if pick.request.model in each.address else "serves another model" for each in endpoints]
EXTENSION = Extension(version=1, make=make, parameters=NoParameters)
"""
)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Callable[..., None]]:
    with installed_in(tmp_path) as add:
        yield add


def settings_with(tree: dict[str, Any]) -> Any:
    return parse({"request_queue_controller": {"watermark_per_backend": 2}, **tree})


def chooser_with(tree: dict[str, Any], *endpoints: Endpoint) -> EndpointChooser:
    """A chooser by the settings `tree` over `endpoints`, by default A in rack 1, B and C in rack 2;
    extensions do not time out."""
    cell = SnapshotCell()
    racks = {A: "1", B: "2", C: "2"}
    listed = endpoints or tuple(Endpoint(each, labels={"rack": rack}) for each, rack in racks.items())
    cell.publish(Snapshot("1", listed))
    tree.setdefault("scheduling", {})["extension_budget"] = "100ms"
    return chooser_of(cell, KnownFleet(settings_with(tree)))


def scheduling(*names: str, **parameters: Any) -> dict[str, Any]:
    listed = [{"name": name, **({"parameters": parameters} if parameters else {})} for name in names]
    return {"scheduling": {"scorers": listed}}


def candidates(chooser: EndpointChooser, **fields: object) -> list[str]:
    """The addresses of the candidates, best first."""
    return [each.partition("=")[0] for each in chooser.choose(ask(**fields)).candidates.split(",") if each]


def test_an_installed_scorer_ranks_endpoints_with_its_own_parameters(installed: Callable[..., None]) -> None:
    installed(PARAMETERS, {"racks": "EXTENSION"})
    assert candidates(chooser_with(scheduling("racks", rack="1")))[0] == A
    assert set(candidates(chooser_with(scheduling("racks", rack="2")))[:2]) == {B, C}


def test_a_stage_may_have_an_installed_scorer_of_its_own(installed: Callable[..., None]) -> None:
    installed(PARAMETERS, {"racks": "EXTENSION"})
    own = {"scorer_parameters": {"racks": {"rack": "2"}}, "extension_budget": "100ms"}
    settings = settings_with(
        {"scheduling": {"stages": {"prefill": {"scorers": {"racks": 3}}, "threshold": 0}, **own}}
    )
    cell = SnapshotCell()
    prefillers = (
        Endpoint(each, {"rack": rack}, decodes=False, prefills=True) for each, rack in ((B, "1"), (C, "2"))
    )
    cell.publish(Snapshot("1", (Endpoint(A), *prefillers)))
    choice = chooser_of(cell, KnownFleet(settings)).choose(ask(can_split=True, body_bytes=9000))
    assert [each.partition("=")[0] for each in choice.prefill.split(",")] == [C, B]
    # No replica has started a scorer that a live change names for the first time.
    change = live_config.flattened({"scheduling": {"stages": {"decode": {"scorers": {"racks": 1}}}}})
    assert live_config.applied(settings, change).settings.scheduling.weights == {"racks": 1}
    with pytest.raises(ConfigError, match="a replica starts without the scorer racks"):
        live_config.applied(settings_with({"scheduling": own}), change)
    with pytest.raises(ConfigError, match="rack: Field required"):
        settings_with({"scheduling": {"stages": {"prefill": {"scorers": {"racks": 1}}}}})


def test_parameters_of_the_list_of_scorers_join_the_section_scorer_parameters(
    installed: Callable[..., None],
) -> None:
    installed(PARAMETERS, {"racks": "EXTENSION", "shelves": "EXTENSION"})
    tree = scheduling("racks", rack="1")
    tree["scheduling"]["stages"] = {"prefill": {"scorers": {"shelves": 1}}}
    tree["scheduling"]["scorer_parameters"] = {"shelves": {"rack": "2"}}
    own = settings_with(tree).scheduling.scorer_parameters
    assert own == {"racks": {"rack": "1"}, "shelves": {"rack": "2"}}


@cases("source, entries, tree, message", {
    "no such scorer": (SCORERS, GOOD, scheduling("third"),
     "no scorer is named 'third'; valid: queue-depth,.*random, raises, second"),
    "a name of ours": (SCORERS, {"random": "EXTENSION_second"}, scheduling("random"),
     "the scorer random of racks 1.0 has the name of a built-in scorer: rename its entry point"),
    "a module that fails": ("import nothing_of_that_name", {"racks": "EXTENSION"}, scheduling("racks"),
     "the scorer racks of racks 1.0 cannot be imported: ModuleNotFoundError: No module named 'nothing"),
    "a module that exits": ("raise SystemExit(3)", {"racks": "EXTENSION"}, scheduling("racks"),
     "the scorer racks of racks 1.0 cannot be imported: SystemExit: 3"),
    "parameters that fail": (PARAMETERS, {"racks": "BROKEN"}, scheduling("racks"),
     "scheduling: the scorer racks cannot check its parameters: KeyError: 'rack 7'"),
    "another object": ("EXTENSION = 3", {"racks": "EXTENSION"}, scheduling("racks"),
     "the scorer racks of racks 1.0 is no picker_fleet.extensions.Extension"),
    "another version": (PARAMETERS, {"racks": "OLD"}, scheduling("racks", rack="1"),
     "written for version 0 .*; this picker has version 1: install a release of racks 1.0 for that version"),
    "a parameter is missing": (PARAMETERS, {"racks": "EXTENSION"}, scheduling("racks"),
     "scheduling: scorer racks: parameters.rack: Field required"),
    "an unknown parameter": (PARAMETERS, {"racks": "EXTENSION"}, scheduling("racks", rack="1", row=2),
     "scorer racks: parameters.row: Extra inputs are not permitted"),
    "parameters in a stage": (PARAMETERS, {"racks": "EXTENSION"},
     {"scheduling": {"stages": {"decode": scheduling("racks", rack="1")["scheduling"]}}},
     r"stages.decode.scorers: must map .*\{name, weight\}; its parameters belong in scheduling.scorer_param"),
    "parameters of ours": ("", {}, scheduling("random", seed=3), "scorer random is built in and takes no"),
    "no such filter": (SCORERS, GOOD, {"scheduling": {"filters": [{"name": "second"}]}},
     r"scheduling.filters.0: no filter is named 'second'; valid: none is installed"),
    "no such ordering": (SCORERS, GOOD, {"fair_request_queue": {"ordering": "edf", "due": {"name": "x"}}},
     "fair_request_queue.due: no ordering is named 'x'"),
    "no such cost estimator": (SCORERS, GOOD, {"fair_request_queue": {"cost": {"name": "x"}}},
     "fair_request_queue.cost: no cost estimator is named 'x'"),
})  # fmt: skip
def test_an_extension_that_cannot_be_used_is_refused_with_its_reason(
    installed: Callable[..., None], source: str, entries: dict[str, str], tree: dict[str, Any], message: str
) -> None:
    installed(source, entries)
    with pytest.raises(ConfigError, match=message):
        settings_with(tree)


@pytest.mark.parametrize("name", FILTERS)
def test_an_extension_cannot_take_the_place_of_a_built_in_filter(
    installed: Callable[..., None], name: str
) -> None:
    installed(FILTER, {name: "EXTENSION"}, "filters")
    with pytest.raises(ConfigError, match=f"the filter {name} of racks 1.0 has the name of a built-in"):
        settings_with({"scheduling": {"filters": [{"name": name}]}})


def test_the_error_names_two_distributions_with_one_extension_name(installed: Callable[..., None]) -> None:
    installed(SCORERS, GOOD)
    installed(SCORERS, GOOD, name="shelves")
    with pytest.raises(
        ConfigError, match=r"racks 1\.0 and shelves 1\.0 both have a scorer second: rename one"
    ):
        settings_with(scheduling("second"))


def test_the_command_check_refuses_an_unusable_extension(
    installed: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(PARAMETERS, {"racks": "EXTENSION"})
    file = tmp_path / "picker.yaml"
    file.write_text("scheduling: {scorers: [{name: racks, weight: 2, parameters: {rack: 1}}]}")
    assert cli.main(["check", str(file)]) == 2
    assert (
        capsys.readouterr().err
        == "scheduling: scorer racks: parameters.rack: Input should be a valid string\n"
    )
    file.write_text('scheduling: {scorers: [{name: racks, weight: 2, parameters: {rack: "1"}}]}')
    assert cli.main(["check", str(file)]) == 0


@pytest.mark.parametrize(
    ("made", "why"),
    [("FAILS", "OSError: no table of racks"), ("FORGETS", "make returned NoneType, no function")],
)
def test_an_extension_whose_construction_fails_keeps_the_replica_from_starting(
    installed: Callable[..., None], made: str, why: str
) -> None:
    installed(PARAMETERS, {"racks": made})
    with pytest.raises(StartupError, match=f"the scorer racks did not start: {why}"):
        Extensions(settings_with(scheduling("racks")))


def test_settings_of_extensions_survive_pool_sections_and_live_changes(
    installed: Callable[..., None],
) -> None:
    installed(PARAMETERS, {"racks": "EXTENSION"})
    settings = settings_with(scheduling("racks", rack="1"))
    names = live_config.scorers_of(settings)
    changes = live_config.flattened({"scheduling": {"scorers": {"racks": 5}}}, scorers=names)
    changed = live_config.applied(settings, changes).settings.scheduling
    assert changed.scorers == {"racks": 5}
    assert changed.scorer_parameters == {"racks": {"rack": "1"}}
    undone = live_config.flattened({"scheduling": {"scorers": None}}, scorers=names)
    assert undone["scheduling.scorers.racks"] is None
    with pytest.raises(ConfigError, match="the configuration has no such scorer; valid: queue-depth"):
        live_config.applied(settings_with({}), changes)


def test_a_scorer_that_raises_is_left_out_and_the_other_scorers_decide(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(SCORERS, GOOD)
    chooser = chooser_with(scheduling("raises", "second"))
    assert set(candidates(chooser)[:2]) == {B, C}
    assert set(chooser.scores()[A]) == {"in-flight", "second", "total"}
    assert "scorer raises is left out, raised: RuntimeError: no such rack" in caplog.text


@pytest.mark.parametrize("scorer", [{}, {"scorers": {"in-flight": 1}}])
def test_an_installed_filter_excludes_endpoints_and_gives_its_reason(
    installed: Callable[..., None], scorer: dict[str, Any]
) -> None:
    installed(FILTER, {"by-model": "EXTENSION"}, "filters")
    chooser = chooser_with({"scheduling": {"filters": [{"name": "by-model"}], **scorer}})
    asked = ask(model=B)
    choice = chooser.choose(asked)
    assert [each.partition("=")[0] for each in choice.candidates.split(",")] == [B]
    assert chooser.unscored(asked).candidates == B, "the second try must not pass the filter"
    assert candidates(chooser, model="none") == []
    chooser.refused(asked, choice)
    explained = chooser.explain(asked.id)
    assert explained is not None
    assert explained.excluded == {A: "serves another model", C: "serves another model"}


def test_requests_share_no_ranking_while_a_scorer_may_read_the_request(
    installed: Callable[..., None],
) -> None:
    body = "return [float(pick.request.model in each.address) for each in candidates]"
    installed(scorers({"own": body}), {"own": "EXTENSION_own"})
    chooser = chooser_with(scheduling("own"))
    for address in (A, B, C) * 12:  # more requests than cached choices
        assert candidates(chooser, model=address)[0] == address


def ordering(body: str) -> str:
    return (
        f"{IMPORTS}\ndef make(parameters):\n    def of(it):\n        {body}\n    return of\n"
        "EXTENSION = Extension(version=1, make=make, parameters=NoParameters)\n"
    )


@cases("body, early_ms", {
    "due in a second": ("return 1.0", 29_000),
    "due after the TTL's end": ("return 99.0", 0),
    "due before the arrival": ("return -2.5", 32_500),
    "never before a day ago": ("return -1e9", 86_430_000),
    "no number: as without": ("return float('nan')", 0),
})  # fmt: skip
def test_an_ordering_extension_sets_the_due_time_of_a_request(
    installed: Callable[..., None], body: str, early_ms: int
) -> None:
    installed(ordering(body), {"sooner": "EXTENSION"}, "orderings")
    queue = {"ordering": "edf", "due": {"name": "sooner"}}
    assert chooser_with({"fair_request_queue": queue}).early_ms(ask(ttl_s=30.0)) == early_ms
    fcfs = {**queue, "ordering": "fcfs"}
    assert chooser_with({"fair_request_queue": fcfs}).early_ms(ask(ttl_s=30.0)) == 0
    with pytest.raises(ConfigError, match="due counts under ordering edf: set ordering, too"):
        settings_with({"fair_request_queue": {"due": {"name": "sooner"}}})


PROMPT = b'{"model": "llama", "prompt": "tell me more", "n": 3}'


@cases("unit, body, cost", {
    "in requests": ("requests", "return 2.5 * it.sequences", 7.5),
    "in tokens": ("tokens", "return 2.0 * it.body_bytes", 2.0 * len(PROMPT)),
    "no cost: as without": ("requests", "return 0", 3.0),
    "a cost that the stock would lose in rounding": ("requests", "return 1e-7", 3.0),
})  # fmt: skip
def test_an_installed_cost_estimator_replaces_the_built_in_estimate(
    installed: Callable[..., None], unit: str, body: str, cost: float
) -> None:
    installed(ordering(body), {"own": "EXTENSION"}, "cost_estimators")
    settings = settings_with({
        "fair_request_queue": {"cost": {"name": "own"}},
        "scheduling": {"extension_budget": "100ms"},
        "request_queue_controller": {"unit": unit},
    })  # fmt: skip
    intake = Intake(settings, new_id=lambda: "r", keys=Keyring(), estimate_cost=Extensions(settings).cost)
    request = intake.request(read_body(PROMPT), {}, subset=None, trusted=False)
    assert (request.cost, request.learn) == (cost, False)


class Caller:
    """Calls a function as an extension; the clock stands still until the test sets it."""

    def __init__(self, call: Callable[[], object], budget_s: float = 60.0) -> None:
        self.now_s = 100.0
        self.faults: list[str] = []
        self.call = Calls("scorer x", call, budget_s, lambda label, why: self.faults.append(why), self.clock)

    def clock(self) -> float:
        return self.now_s


def test_a_failing_extension_gets_no_calls_for_twice_as_long_after_each_failure() -> None:
    calls: list[float] = []
    is_well = False

    def fail() -> str:
        calls.append(caller.now_s)
        if not is_well:
            raise OSError
        return "well"

    caller = Caller(fail)
    for _ in range(4000):
        caller.call()
        caller.now_s += 0.1
    pauses = [round(second_s - first_s) for first_s, second_s in pairwise(calls)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert caller.faults.count("raised") == len(calls)
    assert caller.faults.count("suspended") == 4000 - len(calls)
    is_well, caller.now_s = True, caller.now_s + 60
    assert caller.call() == "well"
    is_well = False
    assert [caller.call(), caller.call()] == [None, None]
    caller.now_s += 1.0
    is_well = True
    assert caller.call() == "well", "after a success the pause is short again"


def test_a_caller_goes_on_without_an_extension_that_has_not_returned() -> None:
    released, began = threading.Event(), threading.Semaphore(0)

    def wait() -> str:
        began.release()
        released.wait(60)
        return "done"

    caller = Caller(wait, budget_s=0.001)
    assert caller.call() is None, "the function is still in `wait`: the caller has left it"
    assert caller.call() is None
    caller.now_s += 1000
    assert caller.call() is None
    assert caller.faults == ["late", "suspended", "suspended"]
    assert began.acquire(timeout=60), "the one call"
    assert not began.acquire(blocking=False), "a second call"
    released.set()
    while caller.call() is None:  # a late return suspends the function for another second
        caller.now_s += 0.5
    assert "late" in caller.faults


class Untellable(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


@pytest.mark.parametrize("fault", [SystemExit(3), Untellable()])
def test_caller_and_thread_survive_whatever_an_extension_raises(fault: BaseException) -> None:
    def leave() -> None:
        raise fault

    caller = Caller(leave)
    assert caller.call() is None
    caller.now_s += 1
    assert caller.call() is None
    assert caller.faults == ["raised", "raised"]


@cases("group, body, why", {
    "too few scores": ("scorers", "return [1.0]", "1 scores for 3 candidates"),
    "endless scores": ("scorers", "return iter(float, 1.0)", "4 scores for 3 candidates"),
    "endless reasons": ("filters", "return iter(str, 'never')", "4 reasons for 3 endpoints"),
    "a score above 1": ("scorers", "return [0.5, 0.5, 1.5]", "a score is outside 0 to 1"),
    "no score": ("scorers", "return [0.5, 0.5, float('nan')]", "a score is outside 0 to 1"),
    "too few reasons": ("filters", "return ['bad']", "1 reasons for 3 endpoints"),
    "a mask": ("filters", "return [True, False, True]", "a reason is neither a text nor None"),
})  # fmt: skip
def test_an_invalid_result_of_a_filter_or_scorer_is_ignored(
    installed: Callable[..., None], caplog: pytest.LogCaptureFixture, group: str, body: str, why: str
) -> None:
    installed(scorers({"odd": body}), {"odd": "EXTENSION_odd"}, group)
    named = [{"name": "odd"}]
    chooser = chooser_with({"scheduling": {"scorers": named} if group == "scorers" else {"filters": named}})
    assert set(candidates(chooser)) == {A, B, C}
    assert f"is left out, invalid: Nonsense: {why}" in caplog.text


def test_a_filter_cannot_change_the_list_of_endpoints(installed: Callable[..., None]) -> None:
    installed(scorers({"odd": "candidates.clear(); return []"}), {"odd": "EXTENSION_odd"}, "filters")
    chooser = chooser_with({"scheduling": {"filters": [{"name": "odd"}], "scorers": {"queue-depth": 1}}})
    assert set(candidates(chooser)) == {A, B, C}


@pytest.mark.parametrize("scorers", [{}, {"in-flight": 1}])
def test_an_installed_filter_finds_the_only_prefill_endpoint_and_encoder_of_a_large_pool(
    installed: Callable[..., None], scorers: dict[str, float]
) -> None:
    addresses = [f"10.0.{n // 100}.{n % 100}:8000" for n in range(1000)]
    installed(FILTER, {"by-model": "EXTENSION"}, "filters")
    chooser = chooser_with(
        {"scheduling": {"filters": [{"name": "by-model"}], "scorers": scorers, "stages": {"threshold": 0}}},
        *(Endpoint(each, prefills=True, encodes=True) for each in addresses),
    )
    asked = ask(model=addresses[-1], can_split=True, body_bytes=4000, media=1)
    assert chooser.choose(asked).prefill.partition("=")[0] == addresses[-1]
    assert chooser.encoders(asked, Placement(("10.1.0.1:8000",), "")) == (addresses[-1],)
