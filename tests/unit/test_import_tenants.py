"""Import of tenants' limits of LiteLLM and Envoy AI Gateway, from samples as in their documentation."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker_fleet import cli
from picker_fleet.domain.allowlist import FAIRNESS_ID
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError
from picker_kubernetes.import_result import Imported
from picker_kubernetes.import_tenants import imported

CONFIG = """
model_list:
  - model_name: gpt-4
    litellm_params:
      {model: azure/gpt-4, rpm: 480, input_cost_per_token: 3e-05, output_cost_per_token: 0.00006}
  - model_name: llama
    litellm_params: {model: hosted_vllm/llama, api_base: "http://vllm:8000/v1"}
litellm_settings:
  max_budget: 100
  drop_params: true
  default_team_params: {max_budget: 10, budget_duration: 30d, tpm_limit: 50000, rpm_limit: 100}
  default_team_settings: [{team_id: default-settings, max_budget: 100.0}]
  upperbound_key_generate_params: {tpm_limit: 1000}
router_settings: {provider_budget_config: {openai: {budget_limit: 1, time_period: 1d}}, num_retries: 2}
general_settings: {master_key: sk-1234, max_parallel_requests: 8, token_rate_limit_type: output}
"""
TEAMS = [
    {"team_id": "13e8", "team_alias": "search", "tpm_limit": 20, "rpm_limit": 4, "max_parallel_requests": 10,
     "max_budget": 2.5, "budget_duration": "1d", "spend": 0.1, "models": [], "metadata": {},
     "model_rpm_limit": {"gpt-4": 100}, "team_member_rpm_limit": 3,
     "team_memberships": [{"user_id": "u", "litellm_budget_table": {"max_budget": 1}}]},
    {"team_id": "de35", "team_alias": "QA Prod Bot", "max_budget": 1, "budget_duration": "30s",
     "rpm_limit": None},
]  # fmt: skip
KEYS = {
    "keys": [
        {"token": "88dc", "key_alias": "ci/nightly", "team_id": "13e8", "tpm_limit": 100, "tpd_limit": 99000,
         "rpm_limit": 2, "max_budget": 100, "budget_duration": "1mo",
         "soft_budget": 5, "metadata": {"model_tpm_limit": {"gpt-4": 1}, "owner": "x"}},
        {"token": "99ab", "key_alias": None, "team_id": "13e8", "spend": 3, "blocked": None},
        {"token": "77cd", "key_alias": "batch", "team_id": None, "budget_id": "free",
         "litellm_budget_table": {"budget_id": "free", "rpm_limit": 7, "tpd_limit": 9000}},
        {"token": "55ef", "key_alias": "stopped", "team_id": "gone", "rpm_limit": 0},
    ],
    "total_count": 4,
}  # fmt: skip
ROUTE = """
apiVersion: aigateway.envoyproxy.io/v1beta1
kind: AIGatewayRoute
metadata: {name: route}
spec:
  llmRequestCosts:
    - {metadataKey: llm_input_token, type: InputToken}
    - {metadataKey: llm_output_token, type: OutputToken}
    - {metadataKey: llm_total_token, type: TotalToken}
    - {metadataKey: llm_cel, type: CEL, cel: "input_tokens * 2u"}
"""


def nodes(result: Imported) -> dict[str, dict[str, Any]]:
    assert parse(result.tree).tenants is not None
    return {each.pop("path"): each for each in map(dict, result.tree["tenants"]["nodes"])}


def assert_named(result: Imported, *texts: str) -> None:
    remarks = "\n".join(result.remarks)
    assert [text for text in texts if text not in remarks] == [], remarks


def test_litellms_teams_and_keys_become_nodes_with_their_limits() -> None:
    result = imported([yaml.safe_load(CONFIG), TEAMS, KEYS | {"total_pages": 3}])
    assert parse(result.tree).extproc.trusted_headers == FAIRNESS_ID[:1]
    assert_named(result, "keys: only 1 of 3 pages of /key/list are given")
    reject = {"over_limit": "reject"}
    assert nodes(result) == {
        "search": reject | {
            "limits": [{"requests": 4, "per": "1m"}, {"answer_tokens": 20, "per": "1m"}],
            "max_parallel_requests": 10, "budget": {"units": 2.5, "period": "day"},
        },
        # The key's 100 tokens a minute, 99000 a day and $100 a month exceed the team's 20 and $2.5 a day.
        "search/ci_nightly": reject | {
            "limits": [{"requests": 2, "per": "1m"}, {"answer_tokens": 20, "per": "1m"}]},
        "batch": reject | {"limits": [{"requests": 7, "per": "1m"}, {"answer_tokens": 9000, "per": "1d"}]},
    }  # fmt: skip
    prices = {"gpt-4": {"prompt": 3e-05, "answer": 6e-05}}
    assert result.tree["tenants"]["prices"] == prices
    assert_named(
        result, "max_budget, default_team_params, default_team_settings, upperbound_key_generate_params, "
        "max_parallel_requests, provider_budget_config: not imported", "model_list: rpm:",
        "has team_memberships.budgets of search",
        "tenants.prices of llama", "limits of search/ci_nightly are lowered", "has model_rpm_limit of search",
        "has team_member_rpm_limit of search", "max_budget per 30s of QA Prod Bot",
        "keys: no counterpart has soft_budget of search/ci_nightly", "metadata.model_tpm_limit of search/ci",
        "rpm_limit 0, which forbids every request, of gone/stopped",
    )  # fmt: skip
    assert "spend" not in "".join(result.remarks)


def test_one_odd_name_or_amount_does_not_stop_the_import_of_litellms_limits() -> None:
    teams = yaml.safe_load(json.dumps([
        {"team_id": "1a", "team_alias": " ", "rpm_limit": 60.0},
        {"team_id": "2b", "team_alias": "a\nb", "rpm_limit": 1.5, "tpm_limit": 2**63 - 1, "tpd_limit": 7},
        {"team_id": "3c", "team_alias": "c" * 300, "max_budget": 1e-05, "budget_duration": "1d"},
        {"team_id": "4d", "team_alias": "dee", "max_parallel_requests": 2_000_000, "max_budget": 3},
    ]))  # fmt: skip
    model = {"model_name": "free", "litellm_params": {"input_cost_per_token": -1, "output_cost_per_token": 1}}
    result = imported([{"model_list": [model]}, teams])
    assert {path: each.keys() - {"over_limit"} for path, each in nodes(result).items()} == {
        "1a": {"limits"}, "2b": {"limits"}, "3c": {"budget"},
    }  # fmt: skip
    assert_named(
        result, "has rpm_limit 1.5 of 2b", "has tpm_limit 9.22337e+18 of 2b",
        "has max_parallel_requests 2e+06 of dee", "has max_budget without budget_duration of dee",
        "tenants.prices of free",
    )  # fmt: skip


def test_each_of_litellms_teams_has_a_node_of_its_own_and_all_pages_are_asked_for() -> None:
    teams = [
        {"team_id": "1", "team_alias": "2", "rpm_limit": 1}, {"team_id": "2", "rpm_limit": 2},
        {"team_id": "3", "team_alias": "same", "rpm_limit": 3}, {"team_alias": "no id", "rpm_limit": 4},
        {"team_id": "3", "team_alias": "same", "rpm_limit": 3},
    ]  # fmt: skip
    result = imported([{"teams": teams, "total_pages": 1}, KEYS | {"total_pages": 2}])
    limits = {path: each.get("limits", [{}])[0].get("requests") for path, each in nodes(result).items()}
    assert {path: limits.get(path) for path in ("1", "2", "same", "no id")} == {
        "1": 1, "2": 2, "same": 3, "no id": 4,
    }  # fmt: skip
    assert "3" not in limits
    assert_named(result, "keys: only 1 of 2 pages of /key/list are given")


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    limits = {"type": "Global", "global": {"rules": list(rules)}}
    return {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1", "kind": "BackendTrafficPolicy",
        "metadata": {"name": "p"}, "spec": {"targetRefs": [], "rateLimit": limits},
    }  # fmt: skip


def rule(amount: int, unit: str, *headers: str, key: str = "", **more: Any) -> dict[str, Any]:
    """A rule by `headers`, where `name` is of type Distinct, `name=value` is of type Exact."""
    split = [each.partition("=") for each in headers]
    selects = [{"name": n, "value": v} if sep else {"name": n, "type": "Distinct"} for n, sep, v in split]
    metadata = {"namespace": "io.envoy.ai_gateway", "key": key}
    cost = {
        "request": {"from": "Number", "number": 0},
        "response": {"from": "Metadata", "metadata": metadata},
    }
    limit = {"limit": {"requests": amount, "unit": unit}} | ({"cost": cost} if key else {})
    return {"clientSelectors": [{"headers": selects}] if selects else [], **limit, **more}


def test_envoy_ai_gateways_token_limits_become_nodes_by_headers() -> None:
    user, team = "x-user-id", "x-team"
    result = imported([
        yaml.safe_load(ROUTE),
        {"apiVersion": "v1", "kind": "List", "items": [policy(
            rule(10, "Hour", team, user, key="llm_input_token"),
            rule(100, "Hour", team, key="llm_output_token"),
            rule(5, "Minute", team),
            rule(900, "Month", f"{team}=ads", key="llm_total_token"),
            rule(2, "Minute", f"{team}=ads"),
            rule(0, "Year", team),
            rule(1, "Hour", team, key="llm_cel"),
            rule(1, "Hour", team, key="other"),
            rule(1, "Hour", team, "x-ai-eg-model=gpt-4", key="llm_total_token"),
            rule(1, "Hour", user, key="llm_total_token"),
            rule(1, "Hour", team, shadowMode=True),
            rule(1, "Hour", team, f"{user}=root"),
            rule(1, "Hour") | {"clientSelectors": [{"sourceCIDR": {"value": "10.0.0.0/8"}}]},
            rule(1, "Hour"),
            rule(1, "Hour", f"{team}= "),
            rule(1, "Hour", f"{team}=one", f"{team}=other"),
        )]},
        {"apiVersion": "aigateway.envoyproxy.io/v1alpha1", "kind": "QuotaPolicy", "metadata": {"name": "q"}},
    ])  # fmt: skip
    every = [{"answer_tokens": 100, "per": "1h"}, {"requests": 5, "per": "1m"}]
    assert nodes(result) == {
        "*": {"over_limit": "reject", "limits": every},
        # Every matching rule applies in Envoy, so team ads also has the limits of the rule for any team.
        "ads": {"over_limit": "reject", "budget": {"units": 900, "period": "month"},
                "limits": [{"requests": 2, "per": "1m"}, {"answer_tokens": 100, "per": "1h"}]},
        "*/*": {"over_limit": "reject", "limits": [{"prompt_tokens": 10, "per": "1h"}]},
    }  # fmt: skip
    assert parse(result.tree).extproc.trusted_headers == (team, user)
    assert result.tree["tenants"]["headers"] == [team, user]
    assert_named(
        result, "rule 5: the limit 0 per Year", "rule 6: the cost llm_cel of type CEL",
        "rule 7: the cost other of",
        "rule 8: the selector x-ai-eg-model Exact gpt-4", "rule 9: not imported, since the tree's levels are",
        "rule 10: shadowMode", "rule 11: a selector below one of type", "rule 12: a selector by sourceCIDR",
        "rule 13: a limit of all tenants", f"rule 14: the selector {team} Exact",
        f"rule 15: a rule with two selectors of {team} has no counterpart",
        "QuotaPolicy q has no counterpart",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trees", "fault"),
    [
        ([{"strange": 1}], "neither an EndpointPickerConfig"),
        ([{"apiVersion": "apps/v1", "kind": "Deployment"}], "neither an EndpointPickerConfig"),
        ([{"keys": ["88dc"]}], "return_full_object=true"),
        ([[{"team_id": "a", "rpm_limit": "many"}]], "teams: rpm_limit of a: 'many' is no number"),
        ([policy(rule(3, "Hour", "x-team")), KEYS], "import the files of one product at a time"),
        ([policy(rule(-1, "Hour", "x-team"))], r"p, rule 0: limit\.requests: '-1' is no number"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place_at_fault(trees: list[Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        imported(trees)


def test_the_import_reads_several_files_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, teams = tmp_path / "config.yaml", tmp_path / "teams.json"
    config.write_text(CONFIG)
    teams.write_text(json.dumps(TEAMS))
    assert cli.main(["import-config", str(config), str(teams)]) == 0
    out, err = capsys.readouterr()
    tenants = parse(yaml.safe_load(out)).tenants
    assert tenants is not None
    assert tenants.prices["gpt-4"].answer == 6e-05
    assert "config.yaml, teams.json: teams: no counterpart has model_rpm_limit of search" in err
    objects = tmp_path / "objects.yaml"
    objects.write_text(
        f"---\n{ROUTE}---\n{yaml.safe_dump(policy(rule(3, 'Day', 'x-team', key='llm_input_token')))}"
    )
    assert cli.main(["import-config", str(objects)]) == 0
    assert "prompt_tokens: 3" in capsys.readouterr().out
    assert cli.main(["import-config", str(objects), str(tmp_path / "absent")]) == 2
