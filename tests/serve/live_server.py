"""Servers that really run: uvicorn in a thread of this process, on a port that is free."""

import threading
import time
from contextlib import contextmanager

import httpx
import openai

from foretoken.serve import Settings, app
from foretoken.serve.running import Server, address_of, listen

NAME = "tiny"
DENSE = {"kernels": "dense", "compile": "off"}


class Running:
    """A server, and the ways to ask it."""

    def __init__(self, server, url):
        self.server, self.url, self.service = server, url, server.service
        self.session = self.service.session
        self.known = {}

    def client(self, api_key="none"):
        """OpenAI's own client, which does not try again."""
        if api_key not in self.known:
            self.known[api_key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60.0
            )
        return self.known[api_key]

    def post(self, path, **options):
        return httpx.post(f"{self.url}{path}", timeout=60.0, **options)

    def get(self, path, **options):
        return httpx.get(f"{self.url}{path}", timeout=60.0, **options)

    def metric(self, name, **labels):
        """A figure as Prometheus would read it."""
        return self.service.metrics.registry.get_sample_value(f"foretoken_{name}", labels)


class Slowly:
    """A rule that takes its time, so that a text lasts as long as a test needs."""

    def __init__(self, rule, seconds):
        self.rule, self.seconds, self.calls = rule, seconds, 0

    def __getattr__(self, name):
        return getattr(self.__dict__["rule"], name)

    def verify(self, rows, drafts, scores):
        self.calls += 1
        time.sleep(self.seconds)
        return self.rule.verify(rows, drafts, scores)


@contextmanager
def running(session, learning=None, **settings):
    """A server around a session, for the time of this context."""
    server = Server(app(session, Settings(model_name=NAME, **settings), learning))
    with listen("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        asked = Running(server, address_of(socket))
        try:
            yield asked
        finally:
            server.should_exit = True
            for client in asked.known.values():
                client.close()
            thread.join(timeout=30)
            assert not thread.is_alive()


def wait_for(ready, seconds=30.0):
    """Wait until something is so; fail if it never is."""
    end = time.perf_counter() + seconds
    while not ready():
        assert time.perf_counter() < end, "it never came to be"
        time.sleep(0.005)
