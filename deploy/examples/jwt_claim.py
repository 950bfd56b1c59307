"""Makes Envoy set a request's flow to a claim of its JSON Web Token, which the filter `jwt_authn` checks.

    picker envoy-config --config picker.yaml | python deploy/examples/jwt_claim.py \\
        --issuer https://login.example.org --audience inference --jwks jwks.json --claim sub > envoy.yaml

A request has its token in `authorization: Bearer TOKEN`. Envoy answers 401 unless a key in jwks.json signed
the token, this issuer issued it, and it has not expired; Envoy answers 403 if the token is for another
audience or lacks the claim. Envoy removes the token. If the issuer serves its keys, replace `localJwks` by
`remoteJwks` and a cluster for the issuer.
"""

import argparse
import json
from pathlib import Path

from edge import FAIRNESS_ID, first_filter, read, text, write

_PROVIDER = "clients"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--issuer", required=True)
    parser.add_argument("--audience", required=True)
    parser.add_argument("--jwks", required=True, type=Path, metavar="FILE")
    parser.add_argument("--claim", default="sub", help="claim whose value is the flow (default: %(default)s)")
    args = parser.parse_args()
    keys = text(args.jwks)
    try:
        found = json.loads(keys)
    except ValueError as fault:
        parser.error(f"{args.jwks} is not JSON: {fault}")
    if not isinstance(found, dict) or not found.get("keys"):
        parser.error(f"{args.jwks} contains no keys")
    tree = read()
    claimed = {"name": FAIRNESS_ID, "stringMatch": {"safeRegex": {"regex": ".+"}}}
    # This filter runs after `jwt_authn`, and refuses requests whose valid token lacks the claim for the flow.
    first_filter(
        tree,
        "envoy.filters.http.rbac",
        {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
            "rules": {
                "action": "ALLOW",
                "policies": {
                    "has-a-flow": {
                        "permissions": [{"any": True}],
                        "principals": [{"header": claimed}],
                    }
                },
            },
        },
    )
    first_filter(
        tree,
        "envoy.filters.http.jwt_authn",
        {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
            "providers": {
                _PROVIDER: {
                    "issuer": args.issuer,
                    "audiences": [args.audience],
                    "localJwks": {"inlineString": keys},
                    "requireExpiration": True,
                    "claimToHeaders": [{"headerName": FAIRNESS_ID, "claimName": args.claim}],
                }
            },
            "rules": [{"match": {"prefix": "/"}, "requires": {"providerName": _PROVIDER}}],
        },
    )
    write(tree)


if __name__ == "__main__":
    main()
