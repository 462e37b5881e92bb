"""What a program does in which precision, and where its values leave the range of a dtype."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._audit.api import audit as audit
    from jmpx._audit.report import Audit as Audit
    from jmpx._contracts import (
        check_restored as check_restored,
        describe_precision as describe_precision,
    )
    from jmpx._first_nonfinite import (
        FirstNonfinite as FirstNonfinite,
        first_nonfinite as first_nonfinite,
    )
    from jmpx._progress import (
        NonfiniteCounts as NonfiniteCounts,
        check_progress as check_progress,
        nonfinite as nonfinite,
    )
    from jmpx._ranges.api import ranges as ranges
    from jmpx._ranges.report import Ranges as Ranges
    from jmpx._update_report import (
        LostUpdates as LostUpdates,
        UpdateReport as UpdateReport,
        update_report as update_report,
    )
    from jmpx._wire import Collectives as Collectives, collectives as collectives

    __all__: tuple[str, ...]
else:
    from jmpx._later import later

    __getattr__, __dir__, __all__ = later(
        __name__,
        {
            "_audit.api": "audit",
            "_audit.report": "Audit",
            "_contracts": "check_restored describe_precision",
            "_first_nonfinite": "FirstNonfinite first_nonfinite",
            "_progress": "NonfiniteCounts check_progress nonfinite",
            "_ranges.api": "ranges",
            "_ranges.report": "Ranges",
            "_update_report": "LostUpdates UpdateReport update_report",
            "_wire": "Collectives collectives",
        },
    )
