"""From the configuration's `discovery` section to the source it names."""

from app.config import Discovery
from app.endpoints.file_source import FileSource
from app.endpoints.source import Report as Report
from app.endpoints.source import Source as Source
from app.endpoints.source import Static as Static


def source_of(settings: Discovery) -> Source:
    """The source that `settings` names; an empty static list if it names none."""
    if settings.file is not None:
        return FileSource(settings.file)
    if settings.dns is not None:
        from app.endpoints.dns_source import DnsSource  # its package takes a tenth of a replica's start

        return DnsSource(settings.dns.name, settings.dns.port, interval_s=settings.dns.interval)
    return Static(settings.static or ())
