"""The examples of `deploy/examples`: a request's flow comes from its credentials, never from its headers."""

import base64
import hashlib
import hmac
import json
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from crowd import http_client
from edge_envoy import EXAMPLES, admitted, example, run
from tables import cases
from tls_files import Pair, authority, signed

Headers = list[tuple[str, str]]
ASK = {"model": "llama", "prompt": "x", "max_tokens": 1}
# Request headers with which a client could try to claim another flow.
SPOOFED = [
    ("x-gateway-inference-fairness-id", "another"),
    ("X-Gateway-Inference-Fairness-Id", "another"),
    ("x-llm-d-inference-fairness-id", "another"),
    ("x-gateway-inference-objective", "gold"),
    ("x-forwarded-client-cert", "URI=spiffe://example.org/another"),
    ("x-jwt-payload", "another"),
]
CONFIG = {"objectives": [{"name": "gold", "criticality": "Critical", "weight": 9.0}]}


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    return shared_fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "20", config=CONFIG)


async def asked(url: str, headers: Headers, **options: Any) -> httpx.Response:
    async with http_client(url, **options) as client:
        return await client.post("/v1/completions", json=ASK, headers=headers)


async def assert_admitted(fleet: Any, url: str, headers: Headers, flow: str, **how: Any) -> None:
    """Assert that the request is served as part of `flow`, in the default band."""
    assert (await asked(url, headers, **how)).status_code == 200
    assert (await admitted(fleet))[-1] == (flow, 0)


async def test_an_api_key_gets_the_flow_that_the_table_has_for_its_hash(here: Any, tmp_path: Path) -> None:
    # The API keys' lengths are around SHA-256's block size; the table has only the keys' hashes.
    sizes = (5, 55, 56, 63, 64, 119, 512)
    keys = {f"flow {size} – {size}": f"k{size}-".ljust(size, "y") for size in sizes}
    table = tmp_path / "keys.yaml"
    hashed = {hashlib.sha256(key.encode()).hexdigest(): flow for flow, key in keys.items()}
    table.write_text(yaml.safe_dump(hashed))
    with example(here, tmp_path, "api_key.py", str(table)) as edge:
        for flow, key in keys.items():
            await assert_admitted(here, edge.url, [*SPOOFED, ("authorization", f"Bearer {key}")], flow)
        # Anthropic's clients send their key in this header.
        await assert_admitted(here, edge.url, [*SPOOFED, ("x-api-key", key)], flow)
        before = len(await admitted(here))
        digest = next(iter(hashed))
        too_long = f"Bearer {'y' * 513}"
        for refused in ("x", "Bearer", "Bearer another", f"Bearer {digest}", "Basic a2V5", too_long):
            answer = await asked(edge.url, [*SPOOFED, ("authorization", refused)])
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await asked(edge.url, [*SPOOFED, ("x-api-key", digest)])).status_code == 401
        assert (await asked(edge.url, SPOOFED)).status_code == 401
        assert len(await admitted(here)) == before


# httpx does not wrap a TLS alert that arrives while the client writes.
CLOSED = (httpx.TransportError, ssl.SSLError)
SECRET = b"0123456789abcdef0123456789abcdef"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(secret: bytes = SECRET, **claims: Any) -> tuple[str, str]:
    """The authorization header with a JWT; `claims` replace default claims, and None removes a claim."""
    expires = time.time() + 600
    usual = {"iss": "https://login.example.org", "aud": "inference", "sub": "team-b", "exp": expires}
    body = {name: value for name, value in {**usual, **claims}.items() if value is not None}
    signed = ".".join(b64(json.dumps(part).encode()) for part in ({"alg": "HS256", "kid": "1"}, body))
    return ("authorization", f"Bearer {signed}.{b64(hmac.digest(secret, signed.encode(), 'sha256'))}")


async def test_a_requests_flow_is_the_sub_claim_of_its_jwt(here: Any, tmp_path: Path) -> None:
    jwks = tmp_path / "jwks.json"
    jwks.write_text(json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "1", "k": b64(SECRET)}]}))
    options = ("--issuer", "https://login.example.org", "--audience", "inference", "--jwks", str(jwks))
    with example(here, tmp_path, "jwt_claim.py", *options) as edge:
        for flow in ("team-b", "https://login.example.org/users/7"):
            await assert_admitted(here, edge.url, [*SPOOFED, token(sub=flow)], flow)
        before = len(await admitted(here))
        for refused, status in (
            (("x-other", "1"), 401),
            (token(b"another secret of thirty-two byt"), 401),
            (token(exp=time.time() - 600), 401),
            (token(exp=None), 401),
            (token(iss="https://other.example.org"), 401),
            (token(aud="other"), 403),
            (token(sub=None), 403),
            (token(sub=""), 403),
        ):
            assert (await asked(edge.url, [*SPOOFED, refused])).status_code == status, refused
        assert len(await admitted(here)) == before


async def test_a_requests_flow_is_the_uri_in_the_clients_certificate(here: Any, tmp_path: Path) -> None:
    ours, stranger = authority(tmp_path, "ours"), authority(tmp_path, "stranger")
    server = signed(tmp_path, "server", ours)
    files = ("--certificate", str(server.cert), "--key", str(server.key), "--client-ca", str(ours.cert))
    options = (*files, "--uri-prefix", "spiffe://example.org/")
    with example(here, tmp_path, "client_certificate.py", *options) as edge:
        url = edge.url.replace("http://", "https://")

        def of(certificate: Pair | None) -> ssl.SSLContext:
            context = ssl.create_default_context(cafile=str(ours.cert))
            if certificate is not None:
                context.load_cert_chain(certificate.cert, certificate.key)
            return context

        for number in (1, 2):
            flow = f"spiffe://example.org/team-{number}"
            certificate = signed(tmp_path, f"client{number}", ours, f"URI:{flow}")
            await assert_admitted(here, url, SPOOFED, flow, verify=of(certificate))
        before = len(await admitted(here))
        for refused in (
            signed(tmp_path, "forged", stranger, "URI:spiffe://example.org/team-1"),
            signed(tmp_path, "elsewhere", ours, "URI:spiffe://example.com/team-1"),
            signed(tmp_path, "nameless", ours, "DNS:team-1"),
            None,
        ):
            with pytest.raises(CLOSED):
                await asked(url, SPOOFED, verify=of(refused))
        with pytest.raises(CLOSED):
            await asked(edge.url, SPOOFED)
        assert len(await admitted(here)) == before


def test_a_bootstrap_that_lets_clients_set_their_flow_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "keys.yaml"
    table.write_text(yaml.safe_dump({"ab" * 32: "flow"}))
    trusted = ("--trust-headers", "x-llm-d-inference-fairness-id")
    trusting = run(["-m", "picker_fleet.cli", "envoy-config", *trusted])
    done = subprocess.run(
        [sys.executable, EXAMPLES / "api_key.py", table], input=trusting, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "without --trust-headers" in done.stderr


@cases("script, options, fault", {
    "a table": ("api_key.py", (), "is not YAML"),
    "a set of keys": ("jwt_claim.py", ("--issuer", "i", "--audience", "a", "--jwks"), "is not JSON"),
})  # fmt: skip
def test_a_malformed_file_of_credentials_is_named(
    script: str, options: tuple[str, ...], fault: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("keys: [")
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *options, file], input="", capture_output=True, text=True
    )
    assert (done.returncode > 0, "Traceback" in done.stderr) == (True, False)
    assert str(file) in done.stderr
    assert fault in done.stderr
