"""Replicas of the server on a Ray cluster, behind one address.

Ray Serve starts replicas, watches their health and replaces those that die. Its router hashes the
conversation that a request goes on with (`foretoken.serve.affinity`), so that the keys and values
kept of its earlier turns are where it is answered; a replica that has enough to do or is gone
passes its conversations on to the next of the ring.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import ray
import torch
from prometheus_client import CollectorRegistry, start_http_server
from ray import serve
from ray.serve import context
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.bench import environment
from foretoken.engine.loading import load
from foretoken.errors import CapabilityError, ConfigError, check_values
from foretoken.lm.runtime.heap import keep_few_products
from foretoken.serve.affinity import REPLICA
from foretoken.serve.application import app
from foretoken.serve.running import address_of, listen
from foretoken.serve.service import Service
from foretoken.serve.settings import Settings

CLUSTER: Any = ray  # some of its functions have no types
OURS = "local"  # what Ray calls a cluster that is started for this process alone
NAME = "foretoken"  # of the application in the cluster
ROUTER: Any = {
    "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
}
PROXIES = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "foretoken.serve.affinity.middlewares"}
HEALTH_PERIOD = 2.0  # seconds
TRIES = 2  # of loading a model in a replica, before it is given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How many replicas there are, and what each of them may use."""

    replicas: int = 2
    max_replicas: int | None = None  # None: as many as `replicas`; more are started under load
    threads: int | None = None  # cores of a replica; None: those of this machine, shared out
    metrics_port: int | None = None  # the first of those at which each replica tells its figures

    def __post_init__(self) -> None:
        most, threads, port = self.max_replicas, self.threads, self.metrics_port
        check_values(
            self,
            ("replicas", self.replicas >= 1, "1 or more"),
            ("max_replicas", most is None or most >= self.replicas, "as many as replicas, or more"),
            ("threads", threads is None or threads >= 1, "1 or more"),
            ("metrics_port", port is None or 1 <= port <= 65536 - self.most, "a port, with room "
             "for those of all replicas behind it"),
        )  # fmt: skip

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def cores(self) -> int:
        return self.threads or max(environment.cores() // self.most, 1)

    @property
    def ports(self) -> Sequence[int]:
        """Ports of figures: twice as many as replicas, as one that is replaced may still have its
        own.
        """
        first = self.metrics_port
        return () if first is None else range(first, min(first + 2 * self.most, 65536))


class Replica:
    """One server with a session of its own, in a process of its own."""

    def __init__(self, loading: dict[str, Any], settings: Settings, scale: Scale) -> None:
        keep_few_products()
        torch.set_num_threads(scale.cores)
        self.api = app(load(**loading), replace(settings, metrics=False))
        self.service: Service = self.api.state.service
        self.name = serve.get_replica_context().replica_id.unique_id
        if scale.ports:
            expose(self.service.metrics.registry, scale.ports)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Named(self.api, self.name)

    async def check_health(self) -> None:
        """Raises where the service takes no requests: Ray then replaces the replica."""
        if not self.service.healthy:
            raise CapabilityError(
                f"replica {self.name} was asked whether it takes requests.",
                "its steps have stopped.",
                "nothing: another one is started in its place.",
            )


def expose(registry: CollectorRegistry, ports: Sequence[int]) -> int:
    """Tell figures at the first of these ports that is free, for Prometheus; which one it is.

    A scrape of the common address would reach now one replica, now another.
    """
    for port in ports:
        try:
            start_http_server(port, registry=registry)
        except OSError:  # another replica's, or somebody else's
            continue
        return port
    raise CapabilityError(
        f"figures at one of the ports {ports[0]} to {ports[-1]} were asked for.",
        "none of them is free.",
        "pass another --metrics-port.",
    )


class Named:
    """Says in each response which replica gave it."""

    def __init__(self, api: ASGIApp, name: str) -> None:
        self.api, self.header = api, (REPLICA, name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self.header]
            await send(message)

        await self.api(scope, receive, naming)


def application(
    loading: dict[str, Any], settings: Settings, scale: Scale, ours: bool
) -> serve.Application:
    """What Ray Serve is to run."""
    places = loading.get("max_rows", 16)
    gpus = int(CLUSTER.cluster_resources().get("GPU", 0))
    device = device_of(loading, scale, gpus, ours)
    loading = {**loading, "device": device}
    options: dict[str, Any] = {
        "name": "Replica",
        "max_ongoing_requests": 2 * places,  # a batch, and a batch that waits; then the next one
        "max_queued_requests": max(settings.queue, 1),
        "graceful_shutdown_timeout_s": settings.grace,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_PERIOD,
        "max_constructor_retry_count": TRIES,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
        "ray_actor_options": {
            "num_cpus": scale.cores,
            "num_gpus": int(str(device).startswith("cuda")),
        },
        "request_router_config": RequestRouterConfig(
            **ROUTER, request_router_kwargs={"num_fallback_replicas": scale.most - 1}
        ),
    }
    if scale.most > scale.replicas:
        options["autoscaling_config"] = {
            "min_replicas": scale.replicas,
            "max_replicas": scale.most,
            "target_ongoing_requests": places,
        }
    else:
        options["num_replicas"] = scale.replicas
    deployed: Any = serve.deployment(serve.ingress()(Replica), **options)
    bound: serve.Application = deployed.bind(loading, settings, scale)
    return bound


def device_of(loading: dict[str, Any], scale: Scale, gpus: int, ours: bool) -> Any:
    """Where replicas run: as asked, else on the cluster's GPUs, each on its own, if there are any.

    Left to itself a replica would see all GPUs or none, and take the first. A cluster of ours gets
    no more GPUs than it has: replicas would wait for them for ever.
    """
    asked = loading.get("device")
    wanted = gpus > 0 if asked is None else ours and str(asked).startswith("cuda")
    if wanted and gpus < scale.most:
        raise ConfigError(
            f"{scale.most} replicas were asked for.",
            f"the cluster has {gpus} GPUs, and each replica takes one.",
            f"pass --replicas {gpus}, or --device cpu." if gpus else "pass --device cpu.",
        )
    return "cuda" if asked is None and gpus else asked


def where() -> str:
    """Which cluster is asked for: that at $RAY_ADDRESS, or one of ours."""
    return os.environ.get("RAY_ADDRESS") or OURS


def join(scale: Scale) -> bool:
    """Connect to the cluster at $RAY_ADDRESS, or start one on this machine; whether it is ours.

    A cluster of ours has as many cores as the replicas want: Ray counts them, and waits for those
    that are missing.
    """
    told: dict[str, Any] = {"runtime_env": {"env_vars": PROXIES}, "logging_level": logging.WARNING}
    address = where()
    if address == OURS:
        cores = max(environment.cores(), scale.most * scale.cores)
        CLUSTER.init(address=OURS, num_cpus=cores, include_dashboard=False, **told)
        return True
    try:
        CLUSTER.init(address=address, **told)
    except ConnectionError as error:
        raise ConfigError(
            f"the Ray cluster at {address} (RAY_ADDRESS) was asked for.",
            f"it cannot be reached: {error}",
            "correct RAY_ADDRESS, or unset it to start a cluster on this machine.",
        ) from error
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What a server has started, and takes away at its end; and the URL it is reached at."""

    cluster: bool
    serve: bool  # Ray Serve on the cluster, with the proxies that listen
    url: str


def begin(
    loading: dict[str, Any], settings: Settings, scale: Scale, host: str, port: int
) -> Started:
    """Serve at an address once all replicas are ready; what was started for that."""
    check_device(loading.get("device"))
    url = free(host, port) if where() == OURS else ""  # before a cluster is started for nothing
    ours = join(scale)
    with ExitStack() as undone:  # an interrupt would leave a cluster the application, too
        undone.callback(CLUSTER.shutdown)
        shared = not ours and runs_at(host, port)
        url = url or (url_of(host, port) if shared else free(host, port))
        started = Started(cluster=ours, serve=not shared, url=url)
        undone.callback(clear, started)  # not before it is known that no other's has this name
        try:
            serve.start(http_options=HTTPOptions(host=host, port=int(url.rpartition(":")[2])))
            serve.run(application(loading, settings, scale, ours), name=NAME)
        except (RuntimeError, RayServeException) as error:
            raise CapabilityError(
                f"{scale.replicas} replicas were asked for.",
                f"Ray Serve could not start them: {error}",
                "see that one starts alone, without --ray, and that the cluster has the cores for "
                "all.",
            ) from error
        undone.pop_all()
    return started


def check_device(device: Any) -> None:
    """Refuse a GPU that no replica will see."""
    if re.fullmatch(r"cuda:[1-9]\d*", str(device)):
        raise ConfigError(
            f"replicas on {device} were asked for.",
            "Ray gives each replica a GPU of its own, which it sees as cuda.",
            "pass --device cuda.",
        )


def free(host: str, port: int) -> str:
    """The URL of an address where nobody listens; the proxies of the cluster open it themselves."""
    with listen(host, port) as socket:
        return address_of(socket)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def runs_at(host: str, port: int) -> bool:
    """Whether the Ray Serve of a cluster that we joined listens at this address; False where none
    runs.

    ConfigError where it listens elsewhere, for it keeps to that, and where another server is
    there already, for it would be replaced.
    """
    if NAME in serve.status().applications:
        raise ConfigError(
            f"a server on the Ray cluster at {where()} (RAY_ADDRESS) was asked for.",
            "there is one already, and a cluster has one at a time.",
            "end the other `foretoken serve --ray` (where it was killed: `serve shutdown`), or "
            "unset RAY_ADDRESS to start a cluster on this machine.",
        )
    client: Any = context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return False
    there = client.http_config
    if (there.host, there.port) != (host, port):
        raise ConfigError(
            f"a server at {host}:{port} of the Ray cluster at {where()} was asked for.",
            f"Ray Serve runs there already, and listens at {there.host}:{there.port}.",
            f"pass --host {there.host} --port {there.port}.",
        )
    return True


def end(started: Started) -> None:
    """Take nothing new, let running texts end for their grace, and leave the cluster."""
    try:
        clear(started)
    finally:
        CLUSTER.shutdown()


def clear(started: Started) -> None:
    """Take the application away, and Ray Serve where it is ours and serves nobody else by now: its
    proxies would go on listening.
    """
    with suppress(RayServeException):  # Ray Serve has not begun, or is gone
        serve.delete(NAME)
    if started.cluster or (started.serve and not set(serve.status().applications) - {NAME}):
        CLUSTER.serve.shutdown()


def wait() -> None:
    """Sleep until SIGTERM or Ctrl-C; a second one interrupts whatever then goes on."""
    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    while not stop.wait(1.0):
        pass
