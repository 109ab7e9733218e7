"""moto's server, which speaks S3, on a free port of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from s3fs import S3FileSystem


class Server:
    """A server in a process of its own, with fake credentials in this process's environment."""

    def __init__(self) -> None:
        # The server itself takes a free port: one that was free a moment ago may be another's.
        program = (
            "from moto.server import ThreadedMotoServer as Server; import time; "
            "server = Server('127.0.0.1', 0, verbose=False); server.start(); "
            "print(server.get_host_and_port()[1], flush=True); time.sleep(3600)"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "fake",
            "AWS_SECRET_ACCESS_KEY": "fake",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{self.url}/moto-api/").close()
            except OSError:
                assert time.monotonic() < deadline, "the server doesn't answer"
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def s3_server() -> Iterator[Server]:
    """A server that answers, stopped afterwards."""
    server = Server()
    S3FileSystem.clear_instance_cache()  # one that was made for an earlier server
    try:
        server.wait()
        yield server
    finally:
        server.stop()
