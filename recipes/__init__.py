"""What a person runs: python -m recipes.<verb>."""

import os

# Before torch is imported: OpenMP's threads wait by spinning for a while before they sleep. On cores shared with other work
# its default makes training 15 times slower; a short while keeps a machine of one's own as fast and costs little elsewhere.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
