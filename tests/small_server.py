"""A small server that speaks OpenAI's protocol, as fast as it is told, with faults on demand."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class SmallServer:
    """Waits `first` seconds, then writes a token every `each` seconds; at most `slots` at once."""

    first: float = 0.05
    each: float = 0.01
    slots: int = 1000
    per_piece: int = 1  # tokens in one event
    usage: bool = True
    knows_usage: bool = True  # else it refuses stream_options
    models: tuple[str, ...] = ("small",)
    key: str | None = None
    fault: Callable[[int], str | None] = lambda number: None
    slow_first: Callable[[int], float] = lambda number: 0.0
    asked: list[dict] = field(default_factory=list)
    came: list[float] = field(default_factory=list)  # when each was asked
    written: list[list[float]] = field(default_factory=list)  # when pieces of its text went out
    connections: int = 0
    running: int = 0
    most: int = 0  # requests in flight at once
    url: str = ""

    async def serve(self, ready: Callable[[asyncio.AbstractEventLoop, asyncio.Event], None]):
        self.room = asyncio.Semaphore(self.slots)
        stop = asyncio.Event()
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready(asyncio.get_running_loop(), stop)
        await stop.wait()
        server.close()

    async def connection(self, reader, writer):
        self.connections += 1
        try:
            while request := await reader.readuntil(b"\r\n\r\n"):
                head = request.decode().lower()
                size = next(
                    (int(h[15:]) for h in head.split("\r\n") if h[:15] == "content-length:"), 0
                )
                body = await reader.readexactly(size)
                await self.answer(head, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head, body, writer):
        if self.key is not None and f"authorization: bearer {self.key}" not in head:
            return await whole(writer, 401, {"error": {"message": "a key is wanted"}})
        if head.startswith("get "):
            return await whole(writer, 200, {"data": [{"id": name} for name in self.models]})
        asked = json.loads(body)
        number = len(self.asked)
        self.asked.append(asked)
        self.came.append(perf_counter())
        self.written.append([])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if "stream_options" in asked and not self.knows_usage:
                message = "unknown field stream_options"
                return await whole(writer, 400, {"error": {"message": message}})
            async with self.room:
                await self.write(asked, number, "chat" in head.split()[1], writer)
        finally:
            self.running -= 1

    async def write(self, asked, number, chat, writer):
        fault, tokens = self.fault(number), asked["max_tokens"]
        if fault in ("429", "500"):
            return await whole(writer, int(fault), {"error": {"message": f"fault {fault}"}})
        await asyncio.sleep(self.first + self.slow_first(number))
        if asked["stream"] and fault != "no stream":
            return await self.stream(asked, number, chat, writer)
        await asyncio.sleep(self.each * (tokens - 1))
        text = "a " * tokens
        self.written[number].append(perf_counter())
        choice = {"message": {"content": text}} if chat else {"text": text}
        found = {"choices": [choice | {"finish_reason": "length"}], "usage": used(tokens)}
        return await whole(writer, 200, found)

    async def stream(self, asked, number, chat, writer):
        fault, tokens = self.fault(number), asked["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        if chat:
            await event(writer, piece({"delta": {"role": "assistant", "content": ""}}))
        for n in range(0, tokens, self.per_piece):
            if n:
                await asyncio.sleep(self.each * self.per_piece)
            if fault and n >= tokens // 2:
                break
            text = "a\u2028" * min(self.per_piece, tokens - n)
            self.written[number].append(perf_counter())
            await event(writer, piece({"delta": {"content": text}} if chat else {"text": text}))
        if fault:
            return await wrong(fault, writer)
        done = piece(({"delta": {}} if chat else {"text": ""}) | {"finish_reason": "length"})
        await event(writer, done)
        if self.usage and asked.get("stream_options", {}).get("include_usage"):
            await event(writer, {"choices": [], "usage": used(tokens)})
        return await end(writer, b"data: [DONE]\n\n")


async def wrong(fault, writer):
    """What a fault does in the middle of a stream."""
    if fault == "silent":
        await asyncio.sleep(30)
    said = {
        "cut": b"",
        "malformed": b'data: {"choices": [{"del\n\n',
        "said": b'data: {"error": {"message": "out of memory"}}\n\n',
    }
    if fault in said:
        await end(writer, said[fault])
    else:
        writer.transport.abort()


def used(tokens):
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}


def piece(choice):
    return {"choices": [{"index": 0, "finish_reason": None} | choice]}


async def whole(writer, status, found):
    body = json.dumps(found).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()


async def event(writer, found):
    """One event, its text unescaped as many servers write it."""
    await chunk(writer, f"data: {json.dumps(found, ensure_ascii=False)}\n\n".encode())


async def chunk(writer, data):
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def end(writer, data):
    if data:
        await chunk(writer, data)
    await chunk(writer, b"")


@contextmanager
def serving(**options):
    """A server in a thread of its own, with an event loop of its own."""
    server, ready, found = SmallServer(**options), threading.Event(), []

    def started(loop, stop):
        found.extend((loop, stop))
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(server.serve(started)), daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        found[0].call_soon_threadsafe(found[1].set)
        thread.join(5)
