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
