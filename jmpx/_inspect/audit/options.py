"""What a user asks of an audit."""

from typing import NamedTuple


class Options(NamedTuple):
    """What a user asks of an audit.

    Args:
        platform: the hardware whose products are judged, such as "tpu"; None judges none.
    """

    platform: str | None = None
