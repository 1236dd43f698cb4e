"""A stand-in for `ray start`, which takes half a minute: three processes that do nothing, one of them named as Ray's
dashboard and listening at its port.

Put in place of `service.launch.ray_start.RAY`. While the file exists that STAND_IN_HOLD names, it does not end.
"""

STAND_IN = """
import os, subprocess, sys, time
from pathlib import Path

given = dict(word[2:].split("=", 1) for word in sys.argv[2:] if "=" in word)
DASHBOARD = "import http.server, sys; http.server.test(port=int(sys.argv[2]), bind='127.0.0.1')"
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
for _ in range(2):
    subprocess.Popen(["sleep", "600"], **quiet)
subprocess.Popen([sys.executable, "-c", DASHBOARD, "/dashboard.py", given["dashboard-port"]], **quiet)
Path(given["temp-dir"], "ray_current_cluster").write_text("127.0.0.1:1")
while os.path.exists(os.environ.get("STAND_IN_HOLD", "")):
    time.sleep(0.01)
"""
