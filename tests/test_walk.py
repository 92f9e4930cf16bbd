"""Walks over programs, against following every operand by hand."""

from hypothesis import given
from hypothesis import strategies as st

from autofuse.program.program import CONST
from autofuse.program.walk import needed, sources


@st.composite
def programs(draw):
    """The operands of up to eight steps: earlier steps, Inputs, Consts."""
    args = []
    for step in range(draw(st.integers(1, 8))):
        earlier = [st.integers(0, step - 1)] if step else []
        ref = st.one_of(*earlier, st.integers(-3, -1), st.integers(CONST, CONST + 2))
        args.append(tuple(draw(st.lists(ref, min_size=1, max_size=3))))
    return args


def closure(args, step, given):
    """(steps, sources) that `step` follows from, by recursion."""
    steps, found = {step}, set()
    for ref in args[step]:
        if ref < 0 or ref in given:
            found.add(ref)
        elif ref < CONST:
            more, others = closure(args, ref, given)
            steps |= more
            found |= others
    return steps, found


@given(programs(), st.data())
def test_what_follows_from_what(args, data):
    every = st.sets(st.integers(0, len(args) - 1))
    wanted, at_hand = data.draw(every), data.draw(every)
    steps = set().union(*(closure(args, step, at_hand)[0] for step in wanted), wanted)
    assert needed(args, wanted, at_hand) == sorted(steps)
    for step in range(len(args)):
        assert sources(args, step, at_hand) == closure(args, step, at_hand)[1]


def test_a_long_program_is_no_recursion():
    args = [(~0,), *((step, ~0, CONST) for step in range(5000))]
    assert needed(args, [5000]) == list(range(5001)) and sources(args, 5000) == {~0}
