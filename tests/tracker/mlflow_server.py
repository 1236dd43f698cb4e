"""A tracking server of MLflow: the part of its REST API that is used, over MLflow's own store. The server that comes
with MLflow needs packages that are not installed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient
from mlflow.utils.proto_json_utils import message_to_json


class MLflowServer:
    """Answers requests with this token."""

    def __init__(self, folder: Path, token: str, port: int = 0) -> None:
        self.client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
        self.token, server = token, self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                fields = json.loads(body) if body else dict(parse_qsl(urlsplit(self.path).query))
                is_allowed = self.headers.get("authorization") == f"Bearer {server.token}"
                path = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
                status, answer = (200, server.answer(path, fields)) if is_allowed else (401, {})
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        client, run_id = self.client, fields.get("run_id", "")
        match path:
            case "experiments/get-by-name":
                experiment = client.get_experiment_by_name(fields["experiment_name"]) or client.get_experiment(
                    client.create_experiment(fields["experiment_name"])
                )
                return {"experiment": _plain(experiment)}
            case "runs/search":
                runs = client.search_runs(fields["experiment_ids"], filter_string=fields["filter"])
                return {"runs": [_plain(run) for run in runs]}
            case "runs/create":
                tags = {tag["key"]: tag["value"] for tag in fields["tags"]}
                run = client.create_run(fields["experiment_id"], tags=tags, run_name=fields["run_name"])
                return {"run": _plain(run)}
            case "runs/get":
                return {"run": _plain(client.get_run(run_id))}
            case "runs/log-batch":
                client.log_batch(
                    run_id, [Metric(**metric) for metric in fields.get("metrics", ())],
                    [Param(**param) for param in fields.get("params", ())],
                    [RunTag(**tag) for tag in fields.get("tags", ())],
                )  # fmt: skip
                return {}
            case "runs/set-tag":
                client.set_tag(run_id, fields["key"], fields["value"])
                return {}
            case "runs/update":
                client.set_terminated(run_id, fields["status"])
                return {"run_info": _plain(client.get_run(run_id))["info"]}
        raise NotImplementedError(path)


@contextmanager
def serving(server: MLflowServer) -> Iterator[MLflowServer]:
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def _plain(entity: Any) -> dict[str, Any]:
    return dict(json.loads(message_to_json(entity.to_proto())))
