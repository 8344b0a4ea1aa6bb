"""What to say of a place that cannot be written to."""

import errno
from pathlib import Path


def no_room(error: Exception) -> str | None:
    """What to do about a place that cannot be written to; None for another error."""
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    where = f" in {Path(error.filename).parent}" if error.filename else ""
    return f"cannot write{where}: {error.strerror}. Make room, or name another place"
