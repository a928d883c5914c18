"""Object stores on this machine: emulators of S3 and Google Cloud Storage, and a folder that behaves as one.

`pip install "jdist[remote,emulators]"` brings the emulators, which are too large for every run of the tests.
"""

import http.server
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

BUCKET = "test-bucket"


class FolderStore(LocalFileSystem):
    """A folder as an object store, which processes of one machine share: folders come and go with their objects."""

    protocol = ("folderstore",)

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("folderstore://"))

    def ls(self, path, detail=False, **options):
        """Lists what is there; a folder without objects is none."""
        there = super().ls(path, detail=True, **options)
        return [each for each in there if each["type"] != "directory" or os.listdir(each["name"])]


fsspec.register_implementation("folderstore", FolderStore, clobber=True)


def need(*modules: str) -> None:
    """Skips a test for which the emulators are not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'{module} is not installed: `make remote`, or pip install "jdist[remote,emulators]"')


@contextmanager
def s3() -> Iterator[tuple[dict[str, str], object]]:
    """Runs moto's server; gives the environment in which s3fs finds it, and the server."""
    need("s3fs", "moto", "flask")
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys).create_bucket(Bucket=BUCKET)
    env = {
        "FSSPEC_S3_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        yield env, server
    finally:
        server.stop()


@contextmanager
def gs() -> Iterator[tuple[dict[str, str], object]]:
    """Runs an emulator of Google Cloud Storage; gives the environment in which gcsfs finds it, and the server."""
    need("gcsfs", "gcp_storage_emulator")
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    server.start()
    port = server._api._httpd.socket.getsockname()[1]
    try:
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}, server
    finally:
        server.stop()


class _Refusal(http.server.BaseHTTPRequestHandler):
    """Answers as a store does to those who may do nothing there."""

    def _refuse(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        text = self.server.text.encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/xml" if text.startswith(b"<") else "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _refuse

    def log_message(self, *_):
        """Says nothing on standard error."""


REFUSALS = {
    "s3": "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
    "gs": '{"error": {"code": 403, "message": "Anonymous caller does not have storage.objects.list access."}}',
}


@contextmanager
def refusing(protocol: str) -> Iterator[dict[str, str]]:
    """Runs a store that refuses everything; gives the environment in which its clients find it."""
    need({"s3": "s3fs", "gs": "gcsfs"}[protocol])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusal)
    server.text = REFUSALS[protocol]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        yield {"STORAGE_EMULATOR_HOST": address} if protocol == "gs" else {"FSSPEC_S3_ENDPOINT_URL": address, **keys}
    finally:
        server.shutdown()
        server.server_close()
