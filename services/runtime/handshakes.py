"""A line of the log for a TLS handshake that fails: asyncio closes the connection and says nothing.

Clients decide how often that happens, so lines are few and say how many they stand for. Knows no connection's address.
"""

import logging
import ssl

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.logs import LineBudget

FAILED_PER_S, FAILED_BURST = 0.1, 5
UNBELIEVED = "the client does not believe the certificate: give it the CA that signed it, and a name that it is for"
WORDS = {
    "HTTP_REQUEST": "the client speaks HTTP without TLS: the address must begin with https://",
    "WRONG_VERSION_NUMBER": "what the client speaks is not TLS",
    "TLSV1_ALERT_UNKNOWN_CA": UNBELIEVED,
    "SSLV3_ALERT_BAD_CERTIFICATE": UNBELIEVED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": UNBELIEVED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the certificate has expired, says the client",
    "UNSUPPORTED_PROTOCOL": "the client has only versions of TLS that are too old",
    "NO_SHARED_CIPHER": "the client has none of the server's ciphers",
}
"""What OpenSSL's reasons mean here; others stand for themselves."""

logger = logging.getLogger(__name__)


def log_failures(context: ssl.SSLContext, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Has the failures of a server's handshakes with this context logged."""
    budget, num_unsaid = LineBudget(per_s=FAILED_PER_S, burst=FAILED_BURST), 0

    def note(error: ssl.SSLError) -> None:
        nonlocal num_unsaid
        if not budget.take(clock.monotonic()):
            num_unsaid += 1
            return
        reason = error.reason or type(error).__name__
        found = {"reason": reason, "found": WORDS.get(reason, reason), "others": num_unsaid}
        logger.warning("a TLS handshake with a client failed", extra=found)
        num_unsaid = 0

    class Watched(ssl.SSLObject):
        """One end of a connection."""

        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                note(error)
                raise

    context.sslobject_class = Watched
