"""The valid forms of `redis.url`, and the faults of invalid URLs."""

from typing import Any

import pytest

from picker_fleet.domain.redis_address import Address


def server(host: str = "h", port: int = 6379, **fields: Any) -> Address:
    return Address("server", ((host, port),), **fields, sentinel_tls="tls" in fields)


URLS = [
    ("redis://", server("localhost")),
    ("redis://h", server()),
    ("redis://h:7/3", server(port=7, db=3)),
    ("redis://[::1]:7", server("::1", 7)),
    ("redis://u:p%40ss@h/", server(username="u", password="p@ss")),
    ("redis://h?username=u&password=p%40&db=2", server(db=2, username="u", password="p@")),
    ("redis://:p@h", server(password="p")),
    ("rediss://h", server(tls={"ssl_check_hostname": True})),
    ("rediss://h?ssl_ca_certs=/a%20b&ssl_check_hostname=false",
     server(tls={"ssl_ca_certs": "/a b", "ssl_check_hostname": False})),
    ("rediss://h?ssl_cert_reqs=none", server(tls={"ssl_cert_reqs": "none", "ssl_check_hostname": False})),
    ("unix:///run/redis.sock?db=2", Address("socket", path="/run/redis.sock", db=2)),
    ("unix://u:p@/s", Address("socket", path="/s", username="u", password="p")),
    ("redis+sentinel://u:p@a,b:1/main/4?sentinel_username=su&sentinel_password=sp",
     Address("sentinel", (("a", 26379), ("b", 1)), service="main", db=4, username="u", password="p",
             sentinel_username="su", sentinel_password="sp")),
    ("redis+sentinel://a/main?ssl=true&sentinel_ssl=false&ssl_certfile=c&ssl_keyfile=k",
     Address("sentinel", (("a", 26379),), service="main",
             tls={"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_check_hostname": True})),
    ("redis+cluster://a:1,b", Address("cluster", (("a", 1), ("b", 6379)))),
    ("redis+cluster://a?ssl=yes",
     Address("cluster", (("a", 6379),), tls={"ssl_check_hostname": True}, sentinel_tls=True)),
]  # fmt: skip


@pytest.mark.parametrize(("url", "meant"), URLS)
def test_a_redis_url_is_parsed_into_its_parts(url: str, meant: Address) -> None:
    assert Address.parse(url) == meant


BAD = {
    "must begin with one of": ["", "http://h", "redis:h"],
    "a host must be written": [
        "redis://h:port", "redis://h:0", "redis://h:", "redis://h:70000", "redis+sentinel:///main",
        "redis+sentinel://a,,b/main", "redis://a..b", f"redis://{64 * 'h'}",
    ],
    "is not a URL": ["redis://[::1"],
    "several hosts need": ["redis://a,b"],
    "the database must be a number": ["redis://h/first", "redis+sentinel://a/main/x"],
    "the path has too many parts": ["redis://h/1/2"],
    "the database is given twice": ["redis://h/1?db=2"],
    "a # must be written %23": ["redis://h#1"],
    "unknown option 'timeout'; valid here: username, password, db": ["redis://h?timeout=3"],
    "needs TLS: rediss://": ["redis://h?ssl_ca_certs=/a"],
    "ssl_keyfile needs ssl_certfile": ["rediss://h?ssl_keyfile=/a"],
    "ssl_check_hostname must be true or false": ["rediss://h?ssl_check_hostname=maybe"],
    "must be one of none, optional, required": ["rediss://h?ssl_cert_reqs=some"],
    "cannot be true where ssl_cert_reqs is none": ["rediss://h?ssl_cert_reqs=none&ssl_check_hostname=1"],
    "given twice": ["rediss://h?ssl_ca_certs=a&ssl_ca_certs=b"],
    "a socket is written unix:///path": ["unix://", "unix://host/s"],
    "the path must name the service": ["redis+sentinel://h:1", "redis+sentinel://h:1/"],
    "need ssl=true": ["redis+sentinel://a/main?ssl_ca_certs=c"],
    "a Cluster has database 0 only": ["redis+cluster://a/1"],
    "unknown option 'sentinel_password'": ["redis+cluster://a?sentinel_password=x"],
}  # fmt: skip


@pytest.mark.parametrize(("url", "fault"), [(url, fault) for fault, urls in BAD.items() for url in urls])
def test_the_refusal_of_a_bad_redis_url_names_the_fault_but_no_password(url: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r"^(?!.*hunter2)") as caught:
        Address.parse(url.replace("://", "://user:hunter2@", 1) if "//" in url else url)
    assert fault in str(caught.value)


def test_the_repr_of_a_redis_address_has_no_password() -> None:
    assert "hunter2" not in repr(Address.parse("redis+sentinel://:hunter2@a/s?sentinel_password=hunter2"))
