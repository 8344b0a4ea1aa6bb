"""What a person runs: python -m recipes.<verb>."""

import os

# Set before torch is imported: OpenMP threads that wait by spinning take the cores from each other wherever something
# else runs as well (15 times slower training was seen).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
