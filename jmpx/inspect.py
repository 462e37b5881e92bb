"""What a program does in which precision, and where its values leave the range of a dtype."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._inspect.audit.api import audit as audit
    from jmpx._inspect.audit.report import Audit as Audit
    from jmpx._inspect.blame.api import Blame as Blame, blame as blame
    from jmpx._inspect.choose.api import Choice as Choice, choose as choose
    from jmpx._inspect.compare import Comparison as Comparison, compare as compare
    from jmpx._inspect.emulate import emulate as emulate
    from jmpx._inspect.first_nonfinite.api import first_nonfinite as first_nonfinite
    from jmpx._inspect.first_nonfinite.report import FirstNonfinite as FirstNonfinite
    from jmpx._inspect.hlo.report import Compiled as Compiled, compiled as compiled
    from jmpx._inspect.plan.api import Plan as Plan, plan as plan
    from jmpx._inspect.ranges.api import Ranges as Ranges, ranges as ranges
    from jmpx._inspect.restored import (
        check_restored as check_restored,
        describe_precision as describe_precision,
    )
    from jmpx._inspect.update_report import (
        LostUpdates as LostUpdates,
        UpdateReport as UpdateReport,
        update_report as update_report,
    )
    from jmpx._steps.progress import (
        NonfiniteCounts as NonfiniteCounts,
        check_progress as check_progress,
        nonfinite as nonfinite,
    )

    __all__: tuple[str, ...]
else:
    from jmpx._base.later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_inspect.audit.api": "audit",
            "_inspect.audit.report": "Audit",
            "_inspect.blame.api": "Blame blame",
            "_inspect.choose.api": "Choice choose",
            "_inspect.restored": "check_restored describe_precision",
            "_inspect.compare": "Comparison compare",
            "_inspect.emulate": "emulate",
            "_inspect.first_nonfinite.api": "first_nonfinite",
            "_inspect.first_nonfinite.report": "FirstNonfinite",
            "_steps.progress": "NonfiniteCounts check_progress nonfinite",
            "_inspect.hlo.report": "Compiled compiled",
            "_inspect.plan.api": "Plan plan",
            "_inspect.ranges.api": "Ranges ranges",
            "_inspect.update_report": "LostUpdates UpdateReport update_report",
        },
    )
