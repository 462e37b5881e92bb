"""Lines of code as scopes, for programs that have none: as if each line stood in a named scope."""

import functools
import itertools
import re
from collections.abc import Callable

from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Jaxpr
from jmpx._jaxprs.equations import Place, library_of, place_of
from jmpx._jaxprs.inner import all_equations, once_per_jaxpr
from jmpx._jaxprs.rewriting import with_equations, with_jaxprs


def name_of_line(place: Place) -> str:
    """Returns the name of the scope that a line gets, such as `residual_12`."""
    return re.sub(r"\W", "", f"{place.function}_{place.line}")


@once_per_jaxpr
def calling(jaxpr: Jaxpr) -> set[tuple[str, int]]:
    """Returns the files and numbers of lines that call others: a scope would hold these, too."""
    found = set[tuple[str, int]]()
    for eqn in all_equations(jaxpr):
        frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
        lines = [(f.file_name, f.line_num) for f in frames if not library_of(f.file_name)]
        found.update(line for line in lines if line != lines[0])
    return found


class Lines:
    """A function whose equations are in scopes of their lines; `places` holds these by name."""

    def __init__(self, func: Callable[..., PyTree]) -> None:
        functools.update_wrapper(self, func)
        self.func, self.places = func, dict[str, Place]()
        self.calling = set[tuple[str, int]]()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the function."""
        traced = core.trace(self.func, args, kwargs)
        self.calling = calling(traced.jaxpr)
        return traced.rebuild(core.evaluate(self._named(traced.jaxpr, ""), traced.arrays))

    def _named(self, jaxpr: Jaxpr, called: str) -> Jaxpr:
        def change(eqn: Equation) -> Equation:
            place, name = place_of(eqn, called), eqn.params.get("name", "")
            held = itertools.chain(*map(all_equations, core.inner_jaxprs(eqn.params)))
            if any(place_of(each, name) not in (None, place) for each in held):
                return eqn.replace(params=with_jaxprs(eqn.params, lambda x: self._named(x, name)))
            if place is None or place[:2] in self.calling:
                return eqn
            self.places[name_of_line(place)] = place
            return core.with_scope(eqn, name_of_line(place))

        return with_equations(jaxpr, change)
