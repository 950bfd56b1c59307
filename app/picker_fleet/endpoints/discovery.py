"""From the configuration's `discovery` section to the source it names."""

from picker_fleet.config import Discovery
from picker_fleet.endpoints.file_source import FileSource
from picker_fleet.endpoints.source import Report as Report
from picker_fleet.endpoints.source import Source as Source
from picker_fleet.endpoints.source import Static as Static


def source_of(settings: Discovery) -> Source:
    """The source that `settings` names; an empty static list if it names none."""
    if settings.file is not None:
        return FileSource(settings.file)
    if settings.dns is not None:
        from picker_fleet.endpoints.dns_source import (
            DnsSource,  # its package takes a tenth of a replica's start
        )

        return DnsSource(settings.dns.name, settings.dns.port, interval_s=settings.dns.interval)
    return Static(settings.static or ())
