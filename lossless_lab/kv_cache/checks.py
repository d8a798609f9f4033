"""What an option may be: kinds of number and name, and the one place where values are checked."""

import functools
import operator
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np


def _integer(value, low: int) -> int | None:
    """The value as an int, numpy's welcome; None for anything else, booleans included."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return None
    return operator.index(value) if operator.index(value) >= low else None


def _share(value) -> float | None:
    numeric = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    return float(value) if numeric and 0 < value <= 1 else None


Positive = Annotated[int, functools.partial(_integer, low=1), "be a positive integer"]
Count = Annotated[int, functools.partial(_integer, low=0), "be an integer of at least 0"]
Share = Annotated[float, _share, "lie in (0, 1]"]
FloatDtype = Literal[
    "float32", "fp32", "f32", "float16", "fp16", "f16", "bfloat16", "bf16", "float64", "fp64", "f64"
]


def require(holds: Any, message: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` with that message unless the condition holds."""
    if not holds:
        raise error(message)


def checked(name: str, value: Any, kind: Any, place: str = "") -> Any:
    """`value` as an option of that kind; a kind that is none of those above lets all pass.

    Examples
    --------
    >>> checked("seq_len", np.int64(8), Positive)
    8
    """
    kinds = get_args(kind) if NoneType in get_args(kind) else (kind,)
    if value is None and NoneType in kinds:
        return None
    rules, known = get_args(kinds[0]), get_origin(kinds[0])
    if known is Annotated:
        found, rule = rules[1](value), rules[2]
    elif known is Literal:
        found = next((x for x in rules if type(x) is type(value) and x == value), None)
        rule = f"be one of {', '.join(map(str, rules))}"
    elif kinds[0] is bool:
        found, rule = value if isinstance(value, bool) else None, "be True or False"
    else:
        return value
    require(found is not None, f"`{name}` must {rule}; received {value!r}{place}")
    return found


@functools.cache
def kinds_of(thing: Callable) -> dict[str, Any]:
    """The annotated kind of every field of a class, or of every argument of a function."""
    return get_type_hints(thing, include_extras=True)


def checks_options(function: Callable) -> Callable:
    """Decorator: keyword arguments are checked by the kinds that they are annotated with."""

    @functools.wraps(function)
    def call(*args, **options):
        kinds = kinds_of(function)
        return function(*args, **{n: checked(n, v, kinds.get(n)) for n, v in options.items()})

    return call


def counts(name: str, values) -> np.ndarray:
    """A sequence of positive integers below 2^31 as int64; anything else in it is refused."""
    listed = [checked(name, value, Positive) for value in np.asarray(values).ravel().tolist()]
    require(listed, f"`{name}` must hold at least one number")
    largest = max(listed)
    require(largest < 2**31, f"`{name}` must stay below 2,147,483,648; received {largest:,}")
    return np.array(listed, dtype=np.int64)
