"""How much of a request and its answer Envoy sends: its `protocol_config` in the first message says it.

request body           response body          mode
FULL_DUPLEX_STREAMED   FULL_DUPLEX_STREAMED   standard (also if Envoy says nothing)
FULL_DUPLEX_STREAMED   NONE                   lean
NONE                   NONE                   headers
"""

from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from picker_fleet.errors import Unsupported

_NONE = ProcessingMode.NONE
_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
_MODES = {(_DUPLEX, _DUPLEX): "standard", (_DUPLEX, _NONE): "lean", (_NONE, _NONE): "headers"}


def mode_of(message: ProcessingRequest) -> str:
    """The mode that Envoy speaks.

    Raises:
        Unsupported: it would send bodies in a way that is none of the three modes.
    """
    if not message.HasField("protocol_config"):
        return "standard"
    config = message.protocol_config
    request, response = config.request_body_mode, config.response_body_mode
    mode = _MODES.get((request, response))
    if mode is None:
        names = {number: name for name, number in ProcessingMode.BodySendMode.items()}
        asked, answered = names.get(request, request), names.get(response, response)
        raise Unsupported(
            f"request_body_mode {asked} with response_body_mode {answered} is not supported; "
            "FULL_DUPLEX_STREAMED or NONE is, for both or with NONE for the response"
        )
    return mode
