"""Installs, upgrades, rolls back and removes the chart and the plain manifests on a real API server."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ROOT, ApiServer, built, started
from seat import Seat, opened, until

from picker_tools.local_fleet import network

FOLDER = ROOT / "deploy" / "kubernetes"
CHART = FOLDER / "chart"
SEAT_VALUES = CHART / "values-inference-pool.yaml"
NAMESPACE, RELEASE = "inference", "picker"
GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
OBJECTS = ("inferenceobjectives", "inferencemodelrewrites")
ADDRESS = "127.0.0.61"
Tree = dict[str, Any]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server for this module, which serves objectives and model rewrites in both API groups."""
    _, _, _, crds = built()
    with started(tmp_path_factory.mktemp("install")) as server:
        for kind in OBJECTS:
            path = f"/apis/{GROUPS[0]}/v1alpha2/namespaces/{NAMESPACE}/{kind}"
            text = (crds / f"{GROUPS[1]}_{kind}.yaml").read_text().replace(GROUPS[1], GROUPS[0])
            server.create_all(yaml.safe_load_all(text))
            server.wait_for(path)
        yield server


@pytest.fixture
def namespace(fresh: ApiServer) -> Iterator[ApiServer]:
    """The API server with the fleet's namespace; after the test every object in the namespace is deleted."""
    fresh.put_namespace(NAMESPACE)
    yield fresh
    for path in fresh.objects(NAMESPACE):
        fresh.call("DELETE", path)


def helm(server: ApiServer, *words: str) -> str:
    """Run helm as an administrator; return its output."""
    return run(server, built()[1], "--namespace", NAMESPACE, *words)


def kubectl(server: ApiServer, *words: str) -> str:
    """Run kubectl as an administrator; return its output."""
    return run(server, built()[2], *words)


def run(server: ApiServer, program: str, *words: str) -> str:
    command = [program, "--kubeconfig", str(server.kubeconfig("admin")), *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"HOME": str(server.folder), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(server: ApiServer, *words: str) -> list[Tree]:
    text = helm(server, "template", RELEASE, str(CHART), "--kube-version", "1.36", *words)
    return [tree for tree in yaml.safe_load_all(text) if tree]


def plain(folder: Path) -> list[Tree]:
    """The manifests that the kustomization in `folder` lists."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [tree for name in names for tree in yaml.safe_load_all((folder / name).read_text()) if tree]


def deployment(server: ApiServer) -> Tree:
    return server.call("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{RELEASE}")


def container_of(deployment: Tree) -> Tree:
    found: Tree = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def image(server: ApiServer) -> str:
    return str(container_of(deployment(server))["image"])


def names(trees: list[Tree]) -> list[tuple[str, str]]:
    return sorted((tree["kind"], tree["metadata"]["name"]) for tree in trees)


@pytest.mark.parametrize("values", [(), ("--values", str(SEAT_VALUES))], ids=["dns", "inference-pool"])
def test_helm_installs_upgrades_rolls_back_and_uninstalls_the_chart(
    namespace: ApiServer, values: tuple[str, ...]
) -> None:
    before = set(namespace.objects(NAMESPACE))
    helm(namespace, "install", RELEASE, str(CHART), *values)
    installed = set(namespace.objects(NAMESPACE)) - before
    assert len(installed) == len(rendered(namespace, *values)) + 1, "one more: the release record"
    assert image(namespace) == "picker-fleet:0.1.0"
    helm(namespace, "upgrade", RELEASE, str(CHART), *values, "--set", "image.tag=0.2.0,maxUnavailable=2")
    assert image(namespace) == "picker-fleet:0.2.0"
    budget = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets/{RELEASE}"
    assert namespace.call("GET", budget)["spec"]["maxUnavailable"] == 2
    helm(namespace, "rollback", RELEASE, "1")
    assert image(namespace) == "picker-fleet:0.1.0"
    assert namespace.call("GET", budget)["spec"]["maxUnavailable"] == 1
    helm(namespace, "uninstall", RELEASE)
    assert set(namespace.objects(NAMESPACE)) == before


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "inference-pool"], ids=["dns", "inference-pool"])
def test_kubectl_applies_and_deletes_the_kustomization(namespace: ApiServer, folder: Path) -> None:
    applied = kubectl(namespace, "apply", "-k", str(folder))
    assert len(applied.splitlines()) == len(plain(folder))
    assert image(namespace) == "picker-fleet:0.1.0"
    first = deployment(namespace)["metadata"]["generation"]
    kubectl(namespace, "apply", "-k", str(folder))
    assert deployment(namespace)["metadata"]["generation"] == first, "a second apply changes nothing"
    others = [tree for tree in plain(folder) if tree["kind"] != "Namespace"]
    for tree in others:
        name = f"{tree['kind']}/{tree['metadata']['name']}"
        kubectl(namespace, "--namespace", NAMESPACE, "delete", name, "--wait=false")
    found = namespace.objects(NAMESPACE)
    assert not [path for path in found if path.endswith(f"/{RELEASE}")]


def test_the_chart_and_the_plain_manifests_create_the_same_deployment(
    namespace: ApiServer,
) -> None:
    for words, folder in (((), FOLDER), (("--values", str(SEAT_VALUES)), FOLDER / "inference-pool")):
        trees = rendered(namespace, *words)
        namespace.create_all(trees)
        by_hand = plain(folder)
        assert names(trees) == names(by_hand[1:])
        specs = [deployment(namespace)["spec"]]
        namespace.create_all(by_hand)
        specs.append(deployment(namespace)["spec"])
        for spec in specs:  # only the chart annotates the pods, with a hash of the configuration
            spec["template"]["metadata"].pop("annotations", None)
        assert specs[0] == specs[1]


def test_the_chart_gives_each_further_pool_an_ext_proc_port(namespace: ApiServer, tmp_path: Path) -> None:
    further = [
        {"name": "batch", "port": 9004, "selector": {"app": "batch"}, "targetPorts": [8001]},
        {"name": "night", "port": 9005, "selector": {"app": "night"}, "failureMode": "FailOpen"},
    ]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"inferencePool": {"further": further}}))
    trees = rendered(namespace, "--values", str(SEAT_VALUES), "--values", str(values))
    namespace.create_all(trees)
    pools = {tree["metadata"]["name"]: tree["spec"] for tree in trees if tree["kind"] == "InferencePool"}
    asked_at = {name: pool["endpointPickerRef"] for name, pool in pools.items()}
    wanted = {"llm": 9002, "batch": 9004, "night": 9005}
    assert {name: ref["port"]["number"] for name, ref in asked_at.items()} == wanted
    assert [ref["failureMode"] for ref in asked_at.values()] == ["FailClose", "FailClose", "FailOpen"]
    assert [pool["targetPorts"][0]["number"] for pool in pools.values()] == [8000, 8001, 8000]
    # Service, NetworkPolicy and container pass each pool's port on to the port where the replica listens.
    (service,) = (tree for tree in trees if tree["metadata"]["name"] == asked_at["llm"]["name"])
    container = container_of(deployment(namespace))
    listens = {each["name"]: each["containerPort"] for each in container["ports"]}
    led = {each["port"]: listens[each["targetPort"]] for each in service["spec"]["ports"]}
    assert led == {port: port for port in wanted.values()}
    (policy,) = (tree["spec"] for tree in trees if tree["kind"] == "NetworkPolicy")
    let_in = {each["port"] for each in policy["ingress"][0]["ports"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= let_in
    assert {8000, 8001} <= {rule["ports"][0]["port"] for rule in policy["egress"]}
    (config,) = (tree["data"]["picker.yaml"] for tree in trees if tree["kind"] == "ConfigMap")
    sections = yaml.safe_load(config)["pools"]
    listening = {name.split(".")[1]: (section or {}).get("listen") for name, section in sections.items()}
    assert listening == {"llm": None, "batch": "0.0.0.0:9004", "night": "0.0.0.0:9005"}
    assert {name.split(".")[0] for name in sections} == {NAMESPACE}


def test_the_api_server_accepts_each_example_manifest(namespace: ApiServer) -> None:
    for file in sorted((FOLDER / "examples").glob("*.yaml")):
        namespace.create_all(yaml.safe_load_all(file.read_text()))


@pytest.fixture
async def seat(namespace: ApiServer, tmp_path: Path) -> AsyncIterator[Seat]:
    async with opened(tmp_path) as here:
        yield here


async def test_a_replica_uses_exactly_the_rights_that_the_chart_grants(
    namespace: ApiServer, seat: Seat
) -> None:
    further = f"name=batch,inferencePool.further[0].port={network.free_port()}"
    further += ",inferencePool.further[0].selector.app=batch-server"
    ports = f"inferencePool.targetPorts={{{seat.port}}}"
    trees = rendered(
        namespace, "--values", str(SEAT_VALUES), "--set", f"{ports},inferencePool.further[0].{further}"
    )
    namespace.create_all(trees)
    (rules,) = (tree["rules"] for tree in trees if tree["kind"] == "Role")
    each_of = ("apiGroups", "resources", "verbs")
    granted = {right for rule in rules for right in product(*(rule[name] for name in each_of))}
    # Start a replica with the Deployment's pool, configuration and service account.
    container = container_of(next(tree for tree in trees if tree["kind"] == "Deployment"))
    pool = container["args"][container["args"].index("--pool-name") + 1]
    file = seat.folder / "picker.yaml"
    file.write_text(next(tree for tree in trees if tree["kind"] == "ConfigMap")["data"]["picker.yaml"])
    account = namespace.kubeconfig("account", namespace.token_of(RELEASE, NAMESPACE))
    picker = await seat.start_picker(account, pool, NAMESPACE, "--config", str(file))
    await seat.ready(picker)
    await seat.start_model(ADDRESS)
    namespace.put_pod("server-0", ADDRESS, {"app": "model-server"}, namespace=NAMESPACE)
    await seat.everywhere(lambda found: found == {f"{ADDRESS}:{seat.port}": "ready"}, "the pod is found")
    served = {each["name"] for each in (await picker.admin.get("/api/v1/pools")).json()["pools"]}
    assert served == {f"{NAMESPACE}.{pool}", f"{NAMESPACE}.batch"}
    for group in GROUPS:
        for kind, spec in (("InferenceObjective", {"priority": 1}), ("InferenceModelRewrite", {"rules": []})):
            name, spec = f"one-{group.partition('.')[0]}", {"poolRef": {"name": pool}, **spec}
            namespace.put(f"{group}/v1alpha2", kind, name, NAMESPACE, spec=spec)
    user = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"

    async def used() -> set[tuple[str, str, str]]:
        found = set()
        for call in namespace.calls(user):
            what = call["objectRef"]
            resource = "/".join(part for part in (what["resource"], what.get("subresource")) if part)
            found.add((what.get("apiGroup", ""), resource, call["verb"]))
        return found

    assert await until(used, lambda found: found >= granted, what=f"the use of {granted}") == granted
    answers = {call["responseStatus"]["code"] for call in namespace.calls(user)}
    assert answers == {200}
