"""Makes Envoy set a request's flow to the URI in the client's certificate, such as a SPIFFE ID.

    picker envoy-config --config picker.yaml | python deploy/examples/client_certificate.py \\
        --certificate server.pem --key server.key --client-ca clients.pem \\
        --uri-prefix spiffe://example.org/ > envoy.yaml

Envoy serves TLS with server.pem and server.key, and accepts only clients whose certificate is signed by an
authority in clients.pem and has a URI with this prefix. The flow is the whole URI, so it outlives renewals.
"""

import argparse
from pathlib import Path

from edge import FAIRNESS_ID, filter_chain, first_filter, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("--certificate", "--key", "--client-ca"):
        parser.add_argument(name, required=True, type=Path, metavar="FILE", help="PEM, at Envoy's path")
    parser.add_argument("--uri-prefix", required=True, metavar="URI")
    args = parser.parse_args()
    tree = read()
    filter_chain(tree)["transportSocket"] = {
        "name": "envoy.transport_sockets.tls",
        "typedConfig": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "requireClientCertificate": True,
            "commonTlsContext": {
                "alpnProtocols": ["h2", "http/1.1"],
                "tlsCertificates": [
                    {
                        "certificateChain": {"filename": str(args.certificate)},
                        "privateKey": {"filename": str(args.key)},
                    }
                ],
                "validationContext": {
                    "trustedCa": {"filename": str(args.client_ca)},
                    "matchTypedSubjectAltNames": [{"sanType": "URI", "matcher": {"prefix": args.uri_prefix}}],
                },
            },
        },
    }
    first_filter(
        tree,
        "envoy.filters.http.header_mutation",
        {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {
                "requestMutations": [
                    {
                        "append": {
                            "header": {"key": FAIRNESS_ID, "value": "%DOWNSTREAM_PEER_URI_SAN%"},
                            "appendAction": "OVERWRITE_IF_EXISTS_OR_ADD",
                        }
                    }
                ]
            },
        },
    )
    write(tree)


if __name__ == "__main__":
    main()
