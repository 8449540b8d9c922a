from kv_transfer.transports.registry import DEVICE_NAMES, NAMES
from services.runtime.transports import TRANSPORTS


def test_what_may_be_chosen_is_what_there_is():
    """`tls` takes the place of `tcp` by itself."""
    assert {*TRANSPORTS, "tls"} == set(NAMES)
    assert set(TRANSPORTS) >= DEVICE_NAMES
