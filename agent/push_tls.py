"""What protects a report on its way: TLS, or somebody's word that nobody listens."""

import ipaddress
import ssl

from agent.options import ReportOptions


class UnsafeError(OSError):
    """A token would be read by others, or told to a stranger: it is not sent."""


def client_context(options: ReportOptions) -> ssl.SSLContext | None:
    """Return how the extender is known, of the file as it is now; None for no TLS.

    Raises:
        UnsafeError: the file cannot be used.
    """
    if not options.ca_file:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cafile=options.ca_file)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise UnsafeError(
            f"cannot use reports.ca_file {options.ca_file}: {error.args[-1]}: must be the CAs that "
            "the extender's certificate may be of, in PEM"
        ) from error
    return context


def server_name(options: ReportOptions) -> str:
    """Return the name that the extender's certificate must have.

    Example:
        >>> server_name(ReportOptions(service="idlegpu-agents.idlegpu.svc:9401"))
        'idlegpu-agents.idlegpu.svc'
    """
    return options.server_name or options.service.rpartition(":")[0].strip("[]")


def explain(error: ssl.SSLError, options: ReportOptions) -> OSError:
    """Return a failure of TLS in words, with what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnsafeError(
            f"the extender's certificate is not trusted: {error.verify_message}: reports.ca_file "
            f"({options.ca_file}) must have its CA, and reports.server_name "
            f"({server_name(options)}) be a name that it has"
        )
    return OSError(
        f"no TLS with the extender: {error.reason or error}: does it take reports over TLS "
        "(agents.cert_file)?"
    )


def check_plain(address: str, options: ReportOptions) -> None:
    """Send no token in the clear over a network that nobody has vouched for.

    Raises:
        UnsafeError: it would be.
    """
    if options.allow_plain or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    raise UnsafeError(
        f"{address} is another machine and there is no TLS: token and reports would be sent in the "
        "clear: set reports.ca_file, or reports.allow_plain where the network protects them"
    )
