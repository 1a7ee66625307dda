"""Rates over whole seconds."""

from epdd.fleet.rate import Rate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_is_of_the_last_whole_seconds():
    clock = Clock()
    rate = Rate(clock)
    assert rate.value() == 0
    rate.add(5)
    assert rate.value() == 0        # this second is not over
    clock.now = 101.5
    assert rate.value() == 5
    rate.add(3)
    clock.now = 102
    assert rate.value() == 4
    clock.now = 110
    assert rate.value() == 0.8
    clock.now = 111
    assert rate.value() == 0.3      # the first second has left the window
    clock.now = 500
    assert rate.value() == 0


def test_events_are_counted_at_once_and_leave_after_the_window():
    clock = Clock()
    rate = Rate(clock, window_s=60)
    assert rate.events() == 0
    rate.add(5)
    clock.now = 130.5
    rate.add(2)
    assert rate.events() == 7
    clock.now = 160.9
    assert rate.events() == 7
    clock.now = 161
    assert rate.events() == 2       # of the first second, none is in the last 60
    clock.now = 500
    assert rate.events() == 0
