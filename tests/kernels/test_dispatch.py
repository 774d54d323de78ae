"""Which implementation takes a case, and what is remembered of it."""

from __future__ import annotations

import pytest

from pallas_kernels import _dispatch


def only_even(x):
    if x % 2:
        raise NotImplementedError(f"expected an even number, got {x}")
    return "fast", x


IMPLEMENTATIONS = {"fast": only_even, "reference": lambda x: ("slow", x)}


def test_the_first_that_takes_the_case_and_why(monkeypatch):
    monkeypatch.setattr(_dispatch, "_choices", {})
    assert _dispatch.dispatch("op", IMPLEMENTATIONS, None, 2) == ("fast", 2)
    assert _dispatch.dispatch("op", IMPLEMENTATIONS, None, 3) == ("slow", 3)
    assert _dispatch.choices() == {"op": {"fast": "", "reference": "fast: expected an even number, got 3"}}
    assert _dispatch.describe_choices() == ["op: fast, reference (fast: expected an even number, got 3)"]


def test_a_named_one_has_no_fallback():
    with pytest.raises(NotImplementedError, match="got 3"):
        _dispatch.dispatch("op", IMPLEMENTATIONS, "fast", 3)
    with pytest.raises(ValueError, match=r"must be one of .*'fast', 'reference'.*, got 'other'"):
        _dispatch.dispatch("op", IMPLEMENTATIONS, "other", 3)
    with pytest.raises(NotImplementedError, match="no implementation takes this case: fast: expected an even"):
        _dispatch.dispatch("op", {"fast": only_even}, None, 3)


def test_hopper_kernels_decline_other_devices():
    with pytest.raises(NotImplementedError, match=r"needs a GPU of compute capability 9\.0, got cpu"):
        _dispatch.on_hopper(only_even)(2)
