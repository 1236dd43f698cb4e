"""An S3 server (moto's) as a process on loopback."""

import re
import subprocess
import sys
import threading
from typing import Any

import boto3

from tests.object_store.proxy import EXPIRED, SLOW_DOWN, Refusal

REGION = "us-east-1"


class S3Server:
    """A server with an empty bucket `bucket`. It keeps objects in memory."""

    scheme = "s3"
    denial, overload = EXPIRED, SLOW_DOWN
    puts = (("PUT", "/bucket/jobs/job-a/one"), ("PUT", "/bucket/jobs/job-a/two"))
    """Requests that put two files of a job."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        self.port = next(int(match[1]) for line in lines if (match := re.search(r"Running on http://\S+:(\d+)", line)))
        # Its log of requests would fill the pipe.
        self._log = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._log.start()
        self.client = boto3.client("s3", **client_arguments(self.port))
        self.client.create_bucket(Bucket="bucket")

    def list_keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects in the bucket with a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket="bucket", Key=key)

    def create_bucket(self, name: str) -> None:
        self.client.create_bucket(Bucket=name)

    def delete_bucket(self, name: str) -> None:
        self.client.delete_bucket(Bucket=name)

    def buckets(self) -> list[str]:
        return [bucket["Name"] for bucket in self.client.list_buckets()["Buckets"]]

    def num_open_uploads(self) -> int:
        """Multipart uploads that were neither completed nor aborted."""
        return len(self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", ()))

    def abort_uploads(self) -> None:
        for upload in self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", ()):
            self.client.abort_multipart_upload(Bucket="bucket", Key=upload["Key"], UploadId=upload["UploadId"])

    @staticmethod
    def environment(port: int) -> dict[str, str]:
        """Variables with which clients use the server, or the proxy, at a port."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @staticmethod
    def body_of(refusal: Refusal) -> bytes:
        return f"<Error><Code>{refusal.code}</Code><Message>{refusal.code} here</Message></Error>".encode()

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._log.join()
        self._process.__exit__(None, None, None)


def client_arguments(port: int) -> dict[str, Any]:
    return {
        "endpoint_url": f"http://127.0.0.1:{port}", "region_name": REGION, "aws_access_key_id": "key",
        "aws_secret_access_key": "secret",
    }  # fmt: skip
