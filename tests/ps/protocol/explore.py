"""Goes through all worlds that can come of one, or one random way to its end; says how it came to what is wrong."""

import dataclasses
from collections.abc import Mapping


def key(x):
    """A value that can be hashed, equal for equal worlds."""
    if dataclasses.is_dataclass(x):
        return (type(x).__name__, *(key(getattr(x, f.name)) for f in dataclasses.fields(x)))
    if isinstance(x, Mapping):
        return frozenset((k, key(v)) for k, v in x.items())
    if isinstance(x, tuple):
        return tuple(map(key, x))
    return frozenset(map(key, x)) if isinstance(x, frozenset) else x


def explore(of, world, *, name=hash, most=5_000_000):
    """Goes through all worlds, by `of.moves` and `of.problem`; the number of them."""
    seen, todo = {name(world)}, [(world, None)]
    while todo:
        world, story = todo.pop()
        wrong = of.problem(world)
        assert wrong is None, told(wrong, story)
        for what, make in of.moves(world):
            try:
                after = make()
            except AssertionError as exc:
                raise AssertionError(told(str(exc), (what, story))) from exc
            if (named := name(after)) not in seen:
                seen.add(named)
                todo.append((after, (what, story)))
        assert len(seen) < most, told("it does not end", story)
    return len(seen)


def told(wrong, story):
    """What went wrong, and how it came to that."""
    found = []
    while story is not None:
        what, story = story
        found.append(what)
    return "\n".join([wrong, *reversed(found[-60:] if len(found) > 200 else found)])


def wander(of, world, randomness, most=5000):
    """Goes one random way; the world at its end."""
    story = []
    while todo := sorted(of.moves(world), key=lambda move: move[0]):
        what, make = randomness.choice(todo)
        story.append(what)
        world = make()
        wrong = of.problem(world)
        assert wrong is None, "\n".join([wrong, *story])
        assert len(story) < most, story[-50:]
    return world
