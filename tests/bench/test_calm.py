from bench.calm import Calm


def test_calm_has_lasted_once_every_look_of_a_while_was_calm() -> None:
    times = iter([0.0, 4.0, 5.0])
    calm = Calm(5.0, lambda: next(times))

    assert [calm.has_lasted(is_calm=True) for _ in range(3)] == [False, False, True]


def test_what_is_not_calm_begins_the_while_anew() -> None:
    times = iter([0.0, 6.0, 7.0, 11.0, 12.0])
    calm = Calm(5.0, lambda: next(times))

    looks = [calm.has_lasted(is_calm=each) for each in (True, False, True, True, True)]

    assert looks == [False, False, False, False, True]
