"""Manifests and Helm chart: valid for Kubernetes, consistent with the settings, equal to each other."""

import argparse
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from picker_fleet.domain import config
from picker_kubernetes import chart_flags

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CHART = FOLDER / "chart"
# Oldest and newest Kubernetes version that the manifests support.
VERSIONS = ["1.27", kubernetes_validate.latest_version()]
# Fields of a ServiceMonitor's endpoint that the manifests set, with the types in the operator's definition.
_ENDPOINT = {"port": str, "path": str, "interval": str, "scrapeTimeout": str}

Tree = dict[str, Any]


def plain(folder: Path = FOLDER) -> list[Tree]:
    """The manifests that kustomization.yaml lists."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [tree for name in names for tree in yaml.safe_load_all((folder / name).read_text())]


@pytest.fixture(scope="module")
def renderer() -> str:
    """Path of a program that renders the chart with Helm's engine; the program is built on first use."""
    return output_of("bash", ROOT / ".ci" / "helm-render" / "build").strip()


def rendered(renderer: str, folder: Path, values: Tree | None = None) -> list[Tree]:
    """The chart's manifests for the values `values`, as release `picker` in the namespace `inference`."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values or {}))
    return [tree for tree in yaml.safe_load_all(output_of(renderer, CHART, file)) if tree]


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(trees: list[Tree]) -> None:
    """Fail if an API server would refuse one of `trees`."""
    for tree in trees:
        if tree["kind"] == "InferencePool":
            continue  # tests/kubernetes applies it
        if tree["kind"] == "ServiceMonitor":
            assert tree["apiVersion"] == "monitoring.coreos.com/v1"
            assert tree["spec"].keys() == {"jobLabel", "selector", "endpoints"}
            assert tree["spec"]["selector"].keys() <= {"matchLabels", "matchExpressions"}
            for endpoint in tree["spec"]["endpoints"]:
                assert {name: type(value) for name, value in endpoint.items()} == _ENDPOINT
                assert re.fullmatch(r"\d+s", endpoint["interval"])
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(tree, version, strict=True)


def of(trees: list[Tree], kind: str) -> Tree:
    return next(tree for tree in trees if tree["kind"] == kind)


def container_of(trees: list[Tree]) -> Tree:
    """The only container of the Deployment in `trees`."""
    (container,) = of(trees, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def settings_of(trees: list[Tree]) -> config.Settings:
    """The picker's settings in the ConfigMap of `trees`."""
    return config.parse(yaml.safe_load(of(trees, "ConfigMap")["data"]["picker.yaml"]))


def settings_by(arguments: list[str], **instead: Any) -> config.Settings:
    """The picker's settings from a container's `arguments`; `instead` replaces parsed arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    chart_flags.add_flags(parser)
    args, args.unknown = parser.parse_known_args(arguments)
    assert args.unknown == []
    vars(args).update(instead)
    return chart_flags.settings(args, {})[0]


def strings(tree: Any) -> Iterator[str]:
    """Every string value in a tree of YAML."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from strings(value)
    elif isinstance(tree, str):
        yield tree


def test_every_kubernetes_manifest_is_listed_and_valid() -> None:
    trees = plain()
    listed = set(yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"])
    assert listed == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    check(trees)
    kinds = Counter(tree["kind"] for tree in trees)
    once = {
        "Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget", "ConfigMap", "Namespace",
        "NetworkPolicy", "ServiceAccount", "ServiceMonitor",
    }  # fmt: skip
    assert kinds == {"Service": 2, **dict.fromkeys(once, 1)}


def test_ports_and_selectors_and_other_fields_of_manifests_agree_with_the_settings() -> None:
    trees = plain()
    settings, pod = settings_of(trees), of(trees, "Deployment")["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in container_of(trees)["ports"]}
    # The replica listens on the ports of the container.
    assert settings.extproc.listen == f"0.0.0.0:{ports['grpc']}"
    assert settings.admin.listen == f"0.0.0.0:{ports['admin']}"
    # Selectors match the pods' labels.
    labels = pod["metadata"]["labels"].items()
    for tree in trees:
        selector = tree.get("spec", {}).get("selector") or tree.get("spec", {}).get("podSelector") or {}
        assert (selector.get("matchLabels", selector)).items() <= labels
    # Services target ports of the pods.
    for service in (tree for tree in trees if tree["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports.keys()
    # The pod's termination grace period is longer than a drain.
    needs_s = settings.extproc.drain_grace + settings.extproc.drain_timeout
    assert pod["spec"]["terminationGracePeriodSeconds"] > needs_s
    # The NetworkPolicy allows discovery and Redis.
    assert settings.discovery.dns is not None
    rules = of(trees, "NetworkPolicy")["spec"]
    allowed = {port["port"] for rule in rules["egress"] for port in rule["ports"]}
    assert {53, 6379, settings.discovery.dns.port} <= allowed
    # Replicas reach each other, to transfer budget without Redis.
    me = {"podSelector": {"matchLabels": of(trees, "Deployment")["spec"]["selector"]["matchLabels"]}}
    for way, who in (("ingress", "from"), ("egress", "to")):
        found = [rule["ports"] for rule in rules[way] if me in rule.get(who, [])]
        assert [port["port"] for ports in found for port in ports] == ["grpc"]
    # The ServiceMonitor selects one Service, and not the headless Service.
    monitor = of(trees, "ServiceMonitor")["spec"]["selector"]
    without = {entry["key"] for entry in monitor["matchExpressions"] if entry["operator"] == "DoesNotExist"}
    services = [tree["metadata"] for tree in trees if tree["kind"] == "Service"]
    assert [each["name"] for each in services if not without & each["labels"].keys()] == ["picker"]


@pytest.mark.timeout(540)
def test_the_helm_chart_renders_to_the_plain_manifests(renderer: str, tmp_path: Path) -> None:
    trees = rendered(renderer, tmp_path)
    check(trees)
    assert by_name(unmarked(trees)) == by_name(plain()[1:]), "the plain manifests begin with the namespace"
    values = yaml.safe_load((CHART / "values-inference-pool.yaml").read_text())
    trees = rendered(renderer, tmp_path, values)
    check(trees)
    assert by_name(unmarked(trees)) == by_name(plain(FOLDER / "inference-pool")[1:])


def unmarked(trees: list[Tree]) -> list[Tree]:
    """`trees` without the labels and annotations that only the chart sets."""
    for tree in trees:
        for mark in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
            del tree["metadata"]["labels"][mark]
    del of(trees, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    return trees


def test_the_manifests_for_an_inferencepool_agree_with_each_other() -> None:
    trees = plain(FOLDER / "inference-pool")
    container = container_of(trees)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    found = settings_by(container["args"][3:], config=None)
    listening = {found.extproc.listen, found.extproc.health_listen, found.admin.listen}
    assert listening == {f"0.0.0.0:{port}" for port in ports.values()}
    own = settings_of(trees)
    grace_s = of(trees, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > own.extproc.drain_grace + own.extproc.drain_timeout
    pool = of(trees, "InferencePool")
    assert found.discovery.kubernetes is not None
    assert pool["metadata"]["name"] == found.discovery.kubernetes.pool
    reference = pool["spec"]["endpointPickerRef"]
    service = next(tree for tree in trees if tree["metadata"]["name"] == reference["name"])
    assert [port["port"] for port in service["spec"]["ports"]] == [reference["port"]["number"]]
    assert ports["grpc"] == reference["port"]["number"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "picker-redis", "key": "url"}


@pytest.mark.timeout(540)
def test_the_rendered_helm_chart_follows_its_values(renderer: str, tmp_path: Path) -> None:
    secret = {"name": "PICKER_REDIS__URL", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "url"}}}
    values = {
        "replicas": 5,
        "image": {"repository": "example/picker", "tag": "7"},
        "config": {"extproc": {"listen": "0.0.0.0:9102"}, "admin": {"listen": "0.0.0.0:9181", "tls": {}}},
        "env": [secret],
        **{part: {"enabled": False} for part in ("autoscaling", "networkPolicy", "serviceMonitor")},
    }
    trees = rendered(renderer, tmp_path, values)
    check(trees)
    # Disabled parts of the chart are gone, and other parts follow the values.
    kinds = {tree["kind"] for tree in trees}
    assert kinds == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"}
    container = container_of(trees)
    assert of(trees, "Deployment")["spec"]["replicas"] == 5
    assert (container["image"], container["env"]) == ("example/picker:7", [secret])
    assert [port["containerPort"] for port in container["ports"]] == [9102, 9181]
    assert settings_of(trees).pool == "default"
    probes = [container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "readiness", "liveness")]
    assert probes == ["HTTPS"] * 3
    without_tls = rendered(renderer, tmp_path, {"config": {"admin": {"listen": "0.0.0.0:1", "tls": None}}})
    assert "scheme" not in container_of(without_tls)["readinessProbe"]["httpGet"]
    # Every placeholder in the templates is filled in.
    assert not [text for text in strings(trees) if "{{" in text or "<no value>" in text]


@pytest.mark.timeout(540)
def test_names_that_yaml_reads_as_numbers_or_booleans_stay_names(renderer: str, tmp_path: Path) -> None:
    values = {
        "inferencePool": {"name": "on", "create": True, "further": [
            {"name": "true", "port": 9004, "selector": {"app": "007"}},
        ]},
        "redisSecret": {"name": "123", "key": "no"}, "networkPolicy": {"monitoring": "2025"},
    }  # fmt: skip
    trees = rendered(renderer, tmp_path, values)
    check(trees)
    pools = [tree["metadata"]["name"] for tree in trees if tree["kind"] == "InferencePool"]
    assert pools == ["on", "true"]
    assert all(isinstance(word, str) for word in container_of(trees)["args"])
    assert container_of(trees)["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "123", "key": "no"}


@pytest.mark.timeout(540)
def test_the_chart_configures_several_pools_as_the_replica_reads_them(renderer: str, tmp_path: Path) -> None:
    names = ["llm", "a-pool-of-the-longest-name-that-anybody-has-ever-given-to-a-pool"]
    for first, further in (names, names[::-1]):
        pools = {"name": first, "further": [{"name": further, "port": 9004}]}
        trees = rendered(renderer, tmp_path, {"inferencePool": pools})
        file = tmp_path / "picker.yaml"
        file.write_text(of(trees, "ConfigMap")["data"]["picker.yaml"])
        settings = settings_by(container_of(trees)["args"][1:], config=file)
        (other,) = (pool for name, pool in config.pools_of(settings).items() if name != settings.pool)
        found = other.discovery.kubernetes
        assert found is not None
        assert (found.pool, found.namespace) == (further, "inference")


@pytest.mark.timeout(540)
def test_the_chart_exposes_the_ports_that_an_inferencepools_replicas_listen_at(
    renderer: str, tmp_path: Path
) -> None:
    listen = {"listen": "0.0.0.0:9102", "health_listen": "0.0.0.0:9103"}
    own = {"extproc": listen, "admin": {"listen": "0.0.0.0:9190"}}
    for config_, ports in (({}, [9002, 9003, 9090]), (own, [9102, 9103, 9190])):
        trees = rendered(
            renderer, tmp_path, {"inferencePool": {"name": "llm", "create": True, "config": config_}}
        )
        assert [port["containerPort"] for port in container_of(trees)["ports"]] == ports
        assert of(trees, "InferencePool")["spec"]["endpointPickerRef"]["port"]["number"] == ports[0]
        services = [tree["spec"]["ports"][0]["port"] for tree in trees if tree["kind"] == "Service"]
        assert services == [ports[2], ports[0]]


def by_name(trees: list[Tree]) -> dict[tuple[str, str], Tree]:
    """Objects by kind and name; the YAML texts of a ConfigMap are parsed."""
    found = {(tree["kind"], tree["metadata"]["name"]): tree for tree in trees}
    for tree in trees:
        if tree["kind"] == "ConfigMap":
            tree["data"] = {name: yaml.safe_load(text) for name, text in tree["data"].items()}
    assert len(found) == len(trees)
    return found


def test_the_image_has_the_packages_of_the_extra_kubernetes() -> None:
    """The chart passes --pool-name, so the image needs the packages of the extra `kubernetes`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[<>=]", each)[0] for each in project["optional-dependencies"]["kubernetes"]}
    pinned = (ROOT / "deploy" / "images" / "picker.lock").read_text()
    assert extra <= set(re.findall(r"^([\w.-]+)==", pinned, re.MULTILINE))
