"""The way of a parameter through the source: what counts as handing it on, and how short it stays."""

import ast

from scripts.walk import mentions, stays


def test_a_shape_is_not_the_tensor():
    assert mentions(ast.parse("f(q.transpose(1, 2))"), {"q"})
    assert not mentions(ast.parse("f(q.shape[0], q.dtype, r)"), {"q"})


def test_the_way_of_a_query_is_short():
    """Of all branches together, walked one after the other."""
    assert len(stays("tarnn.ops:linear_attention:q")) <= 16
    assert len(stays("tarnn.ops:delta_rule:q")) <= 10


def test_a_stay_names_the_functions_entered():
    first = stays("tarnn.ops:linear_attention:q")[0]
    assert (first.module, first.functions) == ("tarnn.ops.linear.op", ("linear_attention",))
