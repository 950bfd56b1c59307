"""A real Prometheus for tests: it is Debian's binary with the project's configuration, on the loopback."""

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from crowd import http_client
from redis_servers import debian

from picker_tools.local_fleet.network import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
_READY_S = 30.0


class Prometheus:
    """Prometheus scrapes `targets` (job -> host:port) each second, else as in deploy/prometheus."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / each) for each in config["rule_files"]]
        for job in config["scrape_configs"]:
            assert job.pop("dns_sd_configs")
            job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        files = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
        command = [debian("prometheus"), *files, f"--web.listen-address=127.0.0.1:{port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    async def ready(self) -> None:
        async with asyncio.timeout(_READY_S):
            while True:
                assert self._process.poll() is None, self._log.read_text()
                try:
                    await self.query("vector(1)")
                except (httpx.TransportError, json.JSONDecodeError):  # Prometheus listens before it answers
                    await asyncio.sleep(0.05)
                else:
                    return

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The current vector of the PromQL `expression`; raises AssertionError if it is invalid."""
        async with http_client(timeout=10.0) as client:
            answer = await client.get(f"{self._url}/api/v1/query", params={"query": expression})
        document = answer.json()
        assert document["status"] == "success", f"{expression}: {document.get('error')}"
        found: list[dict[str, Any]] = document["data"]["result"]
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def rules(kind: str) -> dict[str, str]:
    """The expression of every rule of `kind` (record, alert), by name."""
    pages = [yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("rules/*.yml"))]
    groups = [group for page in pages for group in page["groups"]]
    return {rule[kind]: rule["expr"] for group in groups for rule in group["rules"] if kind in rule}


def metric_names(expression: str) -> set[str]:
    """The series that an expression reads."""
    return set(re.findall(r"\b(?:epp_\w+|picker:[\w:]+|process_\w+|vllm:\w+|up)\b", expression))
