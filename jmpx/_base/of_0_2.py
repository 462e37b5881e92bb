"""Where the names of jmpx 0.2 are, for pickles and for `from jmpx import ...`.

Pickles name classes by the files that defined them then.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Pickles of later versions name public classes by their rooms, which do not change.
_FILES = {
    "_audit": "_inspect.audit",
    "_audit.data": "_inspect.audit.data",
    "_audit.report": "_inspect.audit.report",
    "_dynamic_loss_scale": "_scales.dynamic",
    "_ema": "_storage.ema",
    "_first_nonfinite": "_inspect.first_nonfinite",
    "_first_nonfinite.numbers": "_inspect.first_nonfinite.report",
    "_first_nonfinite.report": "_inspect.first_nonfinite.report",
    "_gradient_results": "_steps.results",
    "_jaxpr": "_jaxprs.places",
    "_loss_scale": "_scales.kinds",
    "_low_precision_params": "_storage.low_precision_params",
    "_mixed_precision": "_scales.mixed_precision",
    "_optimizer": "_steps.optimizer",
    "_policy": "_policies.policy",
    "_policy_map": "_policies.maps",
    "_progress": "_steps.progress",
    "_ranges": "_inspect.ranges",
    "_ranges.data": "_inspect.ranges.data",
    "_ranges.report": "_inspect.ranges.report",
    "_rules": "_policies.rules",
    "_state_dtype": "_storage.state_dtype",
    "_update_report": "_inspect.update_report",
    "_wire": "_inspect.collectives.report",
}


class _Finder(MetaPathFinder, Loader):
    """Makes a module for each old file, which hands on the names of the new one.

    `from jmpx import name` looks for a module of a name that `jmpx` does not have, and would then
    raise an error of its own: the finder says where the name is.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = fullname.removeprefix("jmpx.")
        if file not in _FILES:
            _refuse_a_name_that_is_elsewhere(fullname)
            return None
        is_package = any(other.startswith(f"{file}.") for other in _FILES)
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        new = importlib.import_module(f"jmpx.{_FILES[module.__name__.removeprefix('jmpx.')]}")
        vars(module)["__getattr__"] = lambda name: getattr(new, name)


def _refuse_a_name_that_is_elsewhere(fullname: str) -> None:
    module, _, name = fullname.rpartition(".")
    if module == "jmpx":
        from jmpx._base.moved import message  # here, because only errors need it

        if text := message(module, name):
            raise ImportError(text, name=module)


def find_names_of_0_2() -> None:
    """Lets `pickle` import what pickles of jmpx 0.2 name, and old imports say what to write."""
    sys.meta_path.append(_Finder())
