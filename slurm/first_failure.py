"""Name the rank that failed first and show why: python slurm/first_failure.py RUN_DIR/logs/123-start-0

A rank that meets an exception leaves rank-N.error.json (torch's `record`: message, traceback, time); the earliest is
the cause, the others follow from it. Where there is none: the ranks' last words, or which ranks left none.
Its exit code is the failing rank's own: 1 a fault, 2 refused input, 3 a run that stopped itself; 0: not known.
"""

import json
import re
import sys
from pathlib import Path


def rank(path: Path) -> int:
    return int(re.search(r"rank-(\d+)", path.name)[1])


def first_failure(logs: Path) -> tuple[str, int]:
    """The first failing rank and its traceback, or what the ranks said last; and the exit code of that."""
    errors = {}
    for path in logs.glob("rank-*.error.json"):
        try:
            message = json.loads(path.read_text())["message"]
            extra = message["extraInfo"]
            errors[path] = int(extra["timestamp"]), rank(path), extra["py_callstack"].strip()
        except (ValueError, KeyError, TypeError):  # half-written by a rank that was killed
            continue
    if errors:
        path = min(errors, key=lambda path: errors[path][:2])
        log = logs / f"rank-{rank(path)}.log"
        return f"rank {rank(path)} failed first ({len(errors)} failed in all); its log: {log}\n{errors[path][2]}", 1
    said, silent = {}, []
    for path in sorted(logs.glob("rank-*.log"), key=rank):
        text = path.read_text(errors="replace").splitlines()
        lines = [line for line in text if re.match("stopped|error|Fatal", line)] or [""]
        if not lines[-1]:
            silent.append(rank(path))
        elif "another rank has ended" not in lines[-1]:
            said.setdefault(lines[-1], []).append(rank(path))
    if said:
        codes = {"error": 2, "stopped": 3}
        code = min((codes[word] for word in (line.split(":")[0] for line in said) if word in codes), default=0)
        return "\n".join(f"rank {', '.join(map(str, ranks))}: {line}" for line, ranks in said.items()), code
    return (f"rank {', '.join(map(str, silent))} left no word: killed from outside or out of memory, as srun says "
            f"above; the ranks' logs: {logs}"), 0


if __name__ == "__main__":
    text, code = first_failure(Path(sys.argv[1]))
    print(text)
    sys.exit(code)
