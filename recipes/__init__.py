"""What a person runs: python -m recipes.<verb>."""

import os
import sys

# Before torch is imported: OpenMP's threads spin for a while before they sleep. On cores shared with other work its
# default makes training 15 times slower; a short while keeps a machine of one's own as fast and costs little elsewhere.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _interrupted(kind: type[BaseException], *rest: object, otherwise=sys.excepthook) -> None:
    if kind is not KeyboardInterrupt:
        return otherwise(kind, *rest)
    print("stopped by Ctrl-C", file=sys.stderr)
    sys.exit(130)


sys.excepthook = _interrupted  # here, for Ctrl-C may come while torch is imported
