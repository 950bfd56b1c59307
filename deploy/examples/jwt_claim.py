"""The flow of a request by a claim of its JSON Web Token, which Envoy's own `jwt_authn` checks.

    picker envoy-config --config picker.yaml | python deploy/examples/jwt_claim.py \\
        --issuer https://login.example.org --audience inference --jwks jwks.json --claim sub > envoy.yaml

A request brings its token as `authorization: Bearer TOKEN`. Without one that is signed by a key of jwks.json,
in its time and of this issuer, it is answered 401; for another audience or without the claim, 403. The token
goes no further than Envoy. Where the issuer serves its keys itself, put `remoteJwks` (and a cluster for it)
in place of `localJwks`.
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
    parser.add_argument("--claim", default="sub", help="whose value is the flow (default: %(default)s)")
    args = parser.parse_args()
    keys = text(args.jwks)
    if not json.loads(keys).get("keys"):
        parser.error(f"{args.jwks}: no keys in it")
    tree = read()
    claimed = {"name": FAIRNESS_ID, "stringMatch": {"safeRegex": {"regex": ".+"}}}
    # The second of the two: a request ends here if the token that was checked has no claim to be its flow.
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
