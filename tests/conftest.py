"""Before torch is imported: OpenMP threads that wait without spinning, as in the recipes."""

import recipes  # noqa: F401
