from jmpx._inspect.audit.api import audit as audit
from jmpx._inspect.audit.report import Audit as Audit
from jmpx._inspect.blame.api import blame as blame
from jmpx._inspect.blame.report import Blame as Blame
from jmpx._inspect.choose.api import choose as choose
from jmpx._inspect.choose.report import Choice as Choice
from jmpx._inspect.compare.api import compare as compare
from jmpx._inspect.compare.report import Comparison as Comparison
from jmpx._inspect.emulate import emulate as emulate
from jmpx._inspect.first_nonfinite import (
    FirstNonfinite as FirstNonfinite,
    first_nonfinite as first_nonfinite,
)
from jmpx._inspect.hlo.report import Compiled as Compiled, compiled as compiled
from jmpx._inspect.plan.api import Plan as Plan, plan as plan
from jmpx._inspect.ranges.api import ranges as ranges
from jmpx._inspect.ranges.report import Ranges as Ranges
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
