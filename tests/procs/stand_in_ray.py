"""A stand-in for `ray start`, which takes half a minute: three processes that do nothing, one of them named as Ray's
dashboard, which listens at its port before `ray start` ends, and says that no jobs are on the head, and nothing else.

Put in place of `service.head.ray_start.RAY`. While the file exists that STAND_IN_HOLD names, it does not end. While
the one exists that STAND_IN_HOLD_JOBS names, the dashboard keeps back what it says of jobs; that it was asked it writes
there.
"""

DASHBOARD = """
import http.server, os, sys, time

HOLD = os.environ.get("STAND_IN_HOLD_JOBS", "")

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/api/jobs/" and os.path.exists(HOLD):
            with open(HOLD, "w") as file:
                file.write("asked")
            while os.path.exists(HOLD):
                time.sleep(0.01)
        self.send_response(200 if self.path == "/api/jobs/" else 404)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Answer).serve_forever()
"""
STAND_IN = f"""
import os, socket, subprocess, sys, time
from pathlib import Path

DASHBOARD = {DASHBOARD!r}
given = dict(word[2:].split("=", 1) for word in sys.argv[2:] if "=" in word)
port = given["dashboard-port"]
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
for _ in range(2):
    subprocess.Popen(["sleep", "600"], **quiet)
dashboard = subprocess.Popen([sys.executable, "-c", DASHBOARD, "/dashboard.py", port], **quiet)
while socket.socket().connect_ex(("127.0.0.1", int(port))) != 0 and dashboard.poll() is None:
    time.sleep(0.01)
Path(given["temp-dir"], "ray_current_cluster").write_text("127.0.0.1:1")
while os.path.exists(os.environ.get("STAND_IN_HOLD", "")):
    time.sleep(0.01)
"""
