"""Before torch is imported: OpenMP threads that spin but briefly, as in the recipes."""

import recipes  # noqa: F401
