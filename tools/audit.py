"""Looks up locked packages in the databases of known vulnerabilities, by pip-audit; skips unreachable databases.

./start audit [pip-audit words]
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOCKS = Path(__file__).resolve().parent / "locks"


def main(words: Sequence[str]) -> int:
    """Return 1 if a version has a known vulnerability, and 0 otherwise or if no database answered."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off"]
    command += ["--format", "json", *words]
    for lock in ("build", "dev"):
        command += ["-r", str(LOCKS / f"{lock}.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError, TypeError):
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        say(f"Nothing was looked up, because the database does not answer: {why}")
        return 0
    known = [(one, flaw) for one in found for flaw in one.get("vulns", ())]
    for one, flaw in known:
        mended = ", ".join(flaw.get("fix_versions", ())) or "no version yet"
        say(f"{one['name']} {one['version']}: {flaw['id']}, fixed in {mended}")
    say(f"{len(found)} packages looked up, {len(known)} known vulnerabilities.")
    return 1 if known else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
