"""Before torch is imported: OpenMP threads that spin but briefly, as in the recipes. Ctrl-C reaches what tests start."""

import signal

import recipes  # noqa: F401

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # behind nohup or &: processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
