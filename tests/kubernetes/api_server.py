"""A real Kubernetes API server on Debian's etcd. No kubelet runs: tests write the status of pods."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from picker_tools.local_fleet.network import LOOPBACK, free_port

ROOT = Path(__file__).parents[2]
TOKEN = "the-tests-own"
NAMESPACE = "models"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
READY_S = 90.0
Tree = dict[str, Any]

_AUDIT = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


def built() -> tuple[str, str, str, Path]:
    """Paths of the API server, helm, kubectl and the folder of CRDs, which .ci/kubernetes builds."""
    if not (lines := os.environ.get("KUBERNETES_TEST_PARTS", "")):
        made = subprocess.run(["bash", ROOT / ".ci" / "kubernetes"], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-3000:]
        lines = made.stdout
    server, helm, kubectl, crds = lines.split()
    return server, helm, kubectl, Path(crds)


class ApiServer:
    """etcd and kube-apiserver in `folder`. `api`: an administrator's client. A log has every API call."""

    def __init__(self, folder: Path, binary: str, crds: Path) -> None:
        self.folder, self._binary, self._crds = folder, binary, crds
        self._etcd_port, self._peer_port, self.port = free_port(), free_port(), free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"https://{LOOPBACK}:{self.port}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.api = httpx.Client(base_url=self.url, headers=headers, verify=False, timeout=30, trust_env=False)

    def start(self) -> None:
        """Start etcd and the API server, and create the CRDs and the namespace."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run("openssl", "genrsa", "-out", "sa.key", "2048")
        self._run(
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "api.key"),
            *("-out", "api.crt", "-subj", "/CN=localhost", "-days", "3"),
            *("-addext", f"subjectAltName=IP:{LOOPBACK}"),
        )
        (self.folder / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
        (self.folder / "audit.yaml").write_text(_AUDIT)
        etcd = shutil.which("etcd")
        assert etcd, "etcd is missing: install Debian's etcd-server"
        self._spawn(
            "etcd",
            *(etcd, "--data-dir", "etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls", self._etcd_url, "--advertise-client-urls", self._etcd_url),
            *("--listen-peer-urls", f"http://{LOOPBACK}:{self._peer_port}"),
        )
        self.start_api()
        for file in sorted(self._crds.glob("*.yaml")):
            self.create_all(yaml.safe_load_all(file.read_text()))
        self.put_namespace(NAMESPACE)
        self.wait_for(POOLS)

    def wait_for(self, path: str) -> None:
        """Wait until the API server serves the collection at `path`."""
        self._until(lambda: self.api.get(path).status_code == 200, f"{path} is served")

    def start_api(self) -> None:
        """Start the API server, without etcd, and wait until it is ready."""
        self._spawn(
            "apiserver",
            *(self._binary, f"--etcd-servers={self._etcd_url}", "--service-cluster-ip-range=10.0.0.0/24"),
            *("--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=sa.key"),
            *("--service-account-signing-key-file=sa.key", "--token-auth-file=tokens.csv"),
            *("--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount"),
            *(f"--secure-port={self.port}", f"--bind-address={LOOPBACK}"),
            *("--tls-cert-file=api.crt", "--tls-private-key-file=api.key"),
            *("--audit-policy-file=audit.yaml", "--audit-log-path=audit.log", "--audit-log-mode=blocking"),
        )
        self._until(lambda: self.api.get("/readyz").text == "ok", "the API server is ready")

    def kill_api(self) -> None:
        """Kill the API server; etcd keeps running."""
        server = self._processes.pop("apiserver")
        server.kill()
        server.wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.api.close()

    def kubeconfig(self, name: str, token: str = TOKEN) -> Path:
        """Write a kubeconfig file with `token`, and return its path."""
        certificate = base64.b64encode((self.folder / "api.crt").read_bytes()).decode()
        file = self.folder / f"{name}.kubeconfig"
        parts = {
            "cluster": {"server": self.url, "certificate-authority-data": certificate},
            "user": {"token": token},
            "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE},
        }
        tree = {"apiVersion": "v1", "kind": "Config", "current-context": "test"}
        tree |= {f"{part}s": [{"name": "test", part: fields}] for part, fields in parts.items()}
        file.write_text(yaml.safe_dump(tree))
        return file

    def token_of(self, account: str, namespace: str = NAMESPACE) -> str:
        """Create a token for a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        tree = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return str(self.call("POST", path, tree)["status"]["token"])

    def call(self, method: str, path: str, tree: Tree | None = None, kind: str = "application/json") -> Tree:
        """Make an API call, assert its success, and return the answer's JSON."""
        content = None if tree is None else json.dumps(tree)
        answer = self.api.request(method, path, content=content, headers={"content-type": kind})
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:1000]}"
        found: Tree = answer.json()
        return found

    def create_all(self, trees: Iterable[Tree]) -> None:
        for tree in trees:
            self.apply(tree)

    def apply(self, tree: Tree) -> Tree:
        """Apply `tree` on the server. A field that the API does not know is an error."""
        query = "fieldManager=tests&force=true&fieldValidation=Strict"
        path = f"{self.path_of(tree)}/{tree['metadata']['name']}?{query}"
        return self.call("PATCH", path, tree, "application/apply-patch+yaml")

    def path_of(self, tree: Tree) -> str:
        """The path of an object's collection, from the API server's discovery documents."""
        version = tree["apiVersion"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        for resource in self.call("GET", base)["resources"]:
            if resource["kind"] == tree["kind"] and "/" not in resource["name"]:
                namespace = tree["metadata"].get("namespace", "default")
                middle = f"/namespaces/{namespace}" if resource["namespaced"] else ""
                return f"{base}{middle}/{resource['name']}"
        raise AssertionError(f"{version} has no {tree['kind']}")

    def objects(self, namespace: str) -> list[str]:
        """The paths of all objects in a namespace, except events."""
        groups = self.call("GET", "/apis")["groups"]
        bases = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
        paths = [
            f"{base}/namespaces/{namespace}/{resource['name']}"
            for base in bases
            for resource in self.call("GET", base)["resources"]
            if resource["namespaced"] and "list" in resource["verbs"] and resource["kind"] != "Event"
        ]
        return [
            f"{path}/{each['metadata']['name']}" for path in paths for each in self.call("GET", path)["items"]
        ]

    def compact(self) -> None:
        """Compact etcd, so that it keeps only the newest revision."""
        with httpx.Client(base_url=self._etcd_url, trust_env=False) as etcd:
            status = etcd.post("/v3/kv/range", json={"key": "AA=="}).json()
            answer = etcd.post("/v3/kv/compaction", json={"revision": status["header"]["revision"]})
            assert answer.is_success, answer.text

    def calls(self, user: str | None = None) -> list[Tree]:
        """The calls in the audit log; if `user` is given, only that user's calls."""
        lines = (self.folder / "audit.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [each for each in found if user is None or each["user"].get("username") == user]

    def put(
        self,
        version: str,
        kind: str,
        name: str,
        namespace: str = NAMESPACE,
        *,
        labels: Any = None,
        **fields: Any,
    ) -> None:
        """Create or update an object; `fields`: its top-level fields except `metadata`."""
        about = {"name": name, "namespace": namespace, "labels": labels or {}}
        self.apply({"apiVersion": version, "kind": kind, "metadata": about, **fields})

    def put_namespace(self, name: str) -> None:
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def put_pool(self, name: str, ports: Iterable[int], labels: Mapping[str, str]) -> None:
        spec = {
            "selector": {"matchLabels": dict(labels)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        }
        self.put("inference.networking.k8s.io/v1", "InferencePool", name, spec=spec)

    def put_account(self, name: str, rules: Iterable[Tree]) -> Path:
        """Create a service account and a Role with `rules` for it; return its kubeconfig file."""
        role = "rbac.authorization.k8s.io"
        self.put("v1", "ServiceAccount", name)
        self.put(f"{role}/v1", "Role", name, rules=list(rules))
        self.put(
            *(f"{role}/v1", "RoleBinding", name),
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}],
            roleRef={"apiGroup": role, "kind": "Role", "name": name},
        )
        return self.kubeconfig(name, self.token_of(name))

    def put_pod(
        self, name: str, address: str, labels: Mapping[str, str], *, namespace: str = NAMESPACE
    ) -> None:
        """Create a running and ready pod at `address`."""
        spec = {"nodeName": "node", "containers": [{"name": "server", "image": "server"}]}
        self.put("v1", "Pod", name, namespace, labels=dict(labels), spec=spec)
        self.set_ready(name, address, ready=True, namespace=namespace)

    def set_ready(self, name: str, address: str, *, ready: bool, namespace: str = NAMESPACE) -> None:
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        self.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    def delete_pod(self, name: str, *, grace_s: int) -> None:
        """Delete a pod. Without a kubelet the pod stays terminating until it is deleted with `grace_s` 0."""
        self.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": grace_s})

    @property
    def _etcd_url(self) -> str:
        return f"http://{LOOPBACK}:{self._etcd_port}"

    def _run(self, *command: str) -> None:
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            for name, process in self._processes.items():
                assert process.poll() is None, (self.folder / f"{name}.log").read_text()[-3000:]
            with suppress(httpx.TransportError):
                if condition():
                    return
            time.sleep(0.1)
        raise AssertionError(f"timed out after {READY_S:g} s: {what}")


@contextmanager
def started(folder: Path) -> Iterator[ApiServer]:
    """Run an API server in `folder` until the block ends."""
    binary, _, _, crds = built()
    server = ApiServer(folder, binary, crds)
    try:
        server.start()
        yield server
    finally:
        server.stop()
