"""Start `edgellm serve` on a free port, print what curl gets from it, and stop it: for docs/guide/http.md.

python -m docs.ask_server PATH [JSON] [curl words]
"""

import re
import signal
import subprocess
import sys


def main(path: str, data: str = "", *more: str) -> int:
    served = subprocess.Popen(
        [sys.executable, "-m", "edgellm", "serve", "--http-port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        address = ""
        for line in served.stderr or ():
            if found := re.search(r"OpenAI's API: (\S+)/v1", line):
                address = found[1]
                break
        body = ["-H", "Content-Type: application/json", "-d", data] if data else []
        subprocess.run(["curl", "-sN", f"{address}{path}", *body, *more], check=True)
    finally:
        served.send_signal(signal.SIGINT)
        served.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
