"""Tests which named grouping method goes with a policy."""

from wlb.spec.methods import kept_method


def test_a_method_is_kept_with_its_own_policy_only() -> None:
    assert kept_method("multipack_posid", "capacity") == "multipack_posid"
    assert kept_method("multipack_posid", "bounded") == ""
    assert kept_method("", "capacity") == ""
