"""The dashboard's files, and what a browser may do with them."""

import base64
import hashlib
import re

import pytest
from admin_client import api, asking, problem

from picker_fleet.admin.documents import FOLDER, content_security_policy


async def test_the_page_comes_with_a_policy_that_lets_nothing_else_in() -> None:
    async with asking(api()) as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        allowed = page.headers["content-security-policy"]
        assert "default-src 'none'" in allowed
        assert "frame-ancestors 'none'" in allowed
        assert "unsafe" not in allowed
        assert page.headers["x-content-type-options"] == "nosniff"
        # And every file that it names is there
        for name in re.findall(r'(?:src|href)="/?static/([^"]+)"', page.text):
            assert (await http.get(f"/static/{name}")).status_code == 200


@pytest.mark.parametrize("name", ["none.js", "..%2Fapi.py", "%2e%2e/api.py", "api.py", "__init__.py"])
async def test_nothing_else_is_served(name: str) -> None:
    async with asking(api()) as http:
        problem(await http.get(f"/static/{name}"), 404)


def test_inline_pieces_are_allowed_by_what_they_contain() -> None:
    # Given a page with an inline script and style, and a script file
    page = b"<style>p{}</style><script type='module'>go()</script><script src='/static/a.js'></script>"
    # Then the policy has the digest of each, and of nothing else
    script, style = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (b"go()", b"p{}"))
    assert f"script-src 'self' 'sha256-{script}';" in content_security_policy(page)
    assert f"style-src 'self' 'sha256-{style}';" in content_security_policy(page)
    assert content_security_policy(page).count("sha256") == 2


def test_the_page_is_shipped() -> None:
    assert (FOLDER / "index.html").is_file()
