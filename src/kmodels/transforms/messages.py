"""Errors that more than one backend has."""

VALUE = (
    "Python asked for the value of a traced tensor (by if, while, int(), .item(), or a recursion "
    "that depends on it); use cond, while_loop or fori_loop of kmodels.transforms"
)
RECURSION = (
    "the function calls itself without end while it is traced, as cond traces both branches; write "
    "a recursion that depends on a value as while_loop or fori_loop"
)
OUT_AXES = "out_axes is None for a result that depends on what is mapped; give an axis"
