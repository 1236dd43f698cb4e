"""Signals that interrupt work."""

import signal
from collections.abc import Iterator

import pytest

from service.signals import Interruption, interruptions


@pytest.fixture
def hang_up() -> Iterator[None]:
    """Restore the handler of SIGHUP afterwards."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exception(number: signal.Signals, hang_up: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(Interruption), interruptions():
        signal.raise_signal(number)


def test_where_nohup_began_the_process_it_outlives_its_terminal(hang_up: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptions():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
