import signal

import pytest

from zofftk.interrupt import stop_on_interrupt


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_asks_and_the_second_aborts(capfd):
    with stop_on_interrupt() as stop:
        assert not stop.made
        press_ctrl_c()
        assert stop.made
        assert "Ctrl-C again aborts" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_afterwards_ctrl_c_is_what_it_was():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="step failed"), stop_on_interrupt():
        raise RuntimeError("step failed")
    assert signal.getsignal(signal.SIGINT) is before
