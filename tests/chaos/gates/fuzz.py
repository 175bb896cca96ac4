"""Fuzzed decoders: bytes a node wrote, mutated, given to whatever reads them at the next open.

A mutation flips, cuts, repeats, inserts, sets lengths to extremes, or splices two inputs; half of
them then get a checksum that fits, or every decoder would only be asked for its first check. A
decoder answers with what it decoded or a typed error, within a second and without taking memory.
"""

import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flusher.manifest import decode_checkpoint, decode_manifest
from interceptors.shard.state import ShardState
from interceptors.window import decode_window
from scanner.named_reader import NamedReaders
from tests.chaos.gate import Gate, LifeResult, Settings, make_report
from tests.chaos.report import GateReport
from tests.chaos.simulation.disk import EntryWritten, RecordsWritten
from tests.chaos.simulation.scenario import Scenario
from tests.chaos.simulation.world import World
from wal.codec import CHECKSUM_END, crc32c, decode_entry
from wal.errors import StreamingNodeError
from wal.position import RocksMessageId
from wal.rocks.floor import (
    FLOOR_BYTES,
    SLOT_BYTES,
    Floor,
    decode_floor,
    decode_promise,
    decode_token_term,
    encode_slot,
)

INPUT_S_MAX = 1.0
MEMORY_BYTES_MAX = 256 << 20
CORPUS_SEEDS = range(20)
"""Enough that each kind of record is written by several of them."""
INPUTS_PER_LOOK = 2_000
"""Between two looks at the clock and at memory."""
NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
WIDTHS = (1, 2, 4, 8)
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Decoder:
    """What decodes some kind of stored bytes, valid ones, and how a checksum is made to fit
    again.
    """

    decode: Callable[[bytes], object]
    corpus: tuple[bytes, ...]
    sign: Callable[[bytes], bytes] = bytes


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate."""
    begun_s = time.monotonic()
    result = LifeResult()
    decoders = collect_decoders()
    for number in _numbers(gate, settings, begun_s):
        seed = settings.seed + number
        name, finding = fuzz_once(decoders, seed)
        result.tried += 1
        result.counts[name] += 1
        if finding:
            result.findings.append(
                f"{finding}; again: python -m tests.chaos fuzz --count 1 --seed {seed}"
            )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.counts["MiB of memory at most"] = peak_bytes >> 20
    return make_report(
        gate, settings, result, failed=len(result.findings), seconds=time.monotonic() - begun_s
    )


def fuzz_once(decoders: Mapping[str, Decoder], seed: int) -> tuple[str, str]:
    """Give one mutated input to one decoder; return the decoder's name, and what is wrong, empty if
    nothing is.
    """
    choose = random.Random(seed)
    name = choose.choice(sorted(decoders))
    decoder = decoders[name]
    data = mutated(choose, decoder)
    begun_s = time.perf_counter()
    try:
        with _bounded_memory():
            decoder.decode(data)
    except StreamingNodeError:
        pass
    except Exception as error:
        return name, f"{name} raised {type(error).__name__}: {error}"
    took_s = time.perf_counter() - begun_s
    return name, f"{name} took {took_s:.1f} s" if took_s > INPUT_S_MAX else ""


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let the block take `MEMORY_BYTES_MAX` more and no byte beyond, touched or not: the kernel
    refuses that.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use_bytes = int(_STATM.read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + MEMORY_BYTES_MAX, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def mutated(choose: random.Random, decoder: Decoder) -> bytes:
    """Return valid bytes with some mutations, half of the time with a checksum that fits."""
    data = bytearray(choose.choice(decoder.corpus))
    for _ in range(choose.choice((1, 1, 1, 2, 3, 8))):
        _mutate(choose, data, decoder.corpus)
    return decoder.sign(bytes(data)) if choose.random() < 0.5 else bytes(data)


def _mutate(choose: random.Random, data: bytearray, corpus: tuple[bytes, ...]) -> None:
    at = choose.randrange(len(data) + 1)
    match choose.randrange(7):
        case 0 if at < len(data):
            data[at] ^= 1 << choose.randrange(8)
        case 1:
            del data[at:]
        case 2:
            del data[at : at + choose.randint(1, 16)]
        case 3:
            data[at:at] = data[at : at + choose.randint(1, 64)]
        case 4:
            data[at:at] = choose.randbytes(choose.randint(1, 16))
        case 5:
            width = choose.choice(WIDTHS)
            order = choose.choice(("little", "big"))
            number = choose.choice(NUMBERS) & ((1 << 8 * width) - 1)
            data[at : at + width] = number.to_bytes(width, "little" if order == "little" else "big")
        case _:
            other = choose.choice(corpus)
            data[at:] = other[choose.randrange(len(other) + 1) :]


def collect_decoders() -> dict[str, Decoder]:
    """Return the decoders with bytes that simulated nodes wrote."""
    entries: list[bytes] = []
    records: dict[str, list[bytes]] = {"checkpoint/": [], "reader/": []}
    manifests: list[bytes] = []
    for seed in CORPUS_SEEDS:
        with World(seed) as world:
            problems = Scenario(world).run()
            assert not problems, problems
            entries += [
                write.data for write in world.disk.writes if isinstance(write, EntryWritten)
            ]
            manifests += [
                world.files.read(path)
                for path in world.files.files("cuts")
                if path.endswith(".json")
            ]
            for write in world.disk.writes:
                for key, value in (
                    write.changes.items() if isinstance(write, RecordsWritten) else ()
                ):
                    kind = next((prefix for prefix in records if key.startswith(prefix)), None)
                    if kind is not None and value is not None:
                        records[kind].append(value)
    checkpoints = [decode_checkpoint(data) for data in records["checkpoint/"]]
    return {
        "log entry": Decoder(_decode_entry, tuple(entries), _sign_entry),
        "cut manifest": Decoder(
            partial(decode_manifest, name="fuzzed"), tuple(manifests), _sign_manifest
        ),
        "checkpoint": Decoder(decode_checkpoint, tuple(records["checkpoint/"])),
        "shard snapshot": Decoder(
            ShardState.restore, tuple(each.shard_state for each in checkpoints if each.shard_state)
        ),
        "producers' window": Decoder(
            partial(decode_window, kind=RocksMessageId),
            tuple(each.producers for each in checkpoints if each.producers),
        ),
        "reader position": Decoder(_decode_position, tuple(records["reader/"])),
        "floor": Decoder(_decode_floor, _floors(), _sign_floor),
    }


def _decode_entry(data: bytes) -> object:
    entry = decode_entry(data, wal_name=RocksMessageId.wal_name, previous_crc32c=None)
    return entry.messages if entry.rows is None else list(entry.rows.messages())


def _decode_position(data: bytes) -> object:
    class Records:
        async def get(self, _key: str) -> bytes | None:
            return None

        async def scan(self, _prefix: str) -> dict[str, bytes]:
            return {"reader/1/fuzzed": data}

        async def put(self, _changes: Mapping[str, bytes | None]) -> None:
            raise AssertionError("loading writes nothing")

    try:
        NamedReaders(Records(), lambda: {1: "one"}).load().send(None)
    except StopIteration:
        return None
    raise AssertionError("loading waits for nothing")


def _decode_floor(data: bytes) -> object:
    return decode_floor(data), decode_promise(data), decode_token_term(data)


def _floors() -> tuple[bytes, ...]:
    floors = [
        Floor(
            node_id="0" * 32,
            generation=generation,
            term=1,
            tick=5,
            positions=dict.fromkeys(range(1, logs), 9),
        )
        for generation, logs in ((1, 2), (2, 5), (7, 200))
    ]
    slots = [encode_slot(floor).ljust(SLOT_BYTES, b"\0") for floor in floors]
    return tuple((slot + other).ljust(FLOOR_BYTES, b"\0") for slot in slots for other in slots)


def _sign_entry(data: bytes) -> bytes:
    return data[:4] + crc32c(data[CHECKSUM_END:]).to_bytes(4, "little") + data[CHECKSUM_END:]


def _sign_manifest(data: bytes) -> bytes:
    document = data.partition(b"\n")[0]
    return document + b"\ncrc32c:%08x\n" % crc32c(document)


def _sign_floor(data: bytes) -> bytes:
    """Return the file with checksums that fit both slots as they are, where their log count says
    where they end.
    """
    signed = bytearray(data)
    for start in (0, SLOT_BYTES):
        slot = bytes(signed[start : start + SLOT_BYTES])
        count = int.from_bytes(slot[10:12], "little")
        end = _SLOT_HEAD_BYTES + count * _SLOT_POSITION_BYTES
        if len(slot) >= end:
            signed[start : start + 4] = crc32c(slot[4:end]).to_bytes(4, "little")
    return bytes(signed)


_SLOT_HEAD_BYTES = len(encode_slot(Floor(node_id="")))
_SLOT_POSITION_BYTES = len(encode_slot(Floor(node_id="", positions={1: 1}))) - _SLOT_HEAD_BYTES


def _numbers(gate: Gate, settings: Settings, begun_s: float) -> Iterator[int]:
    if settings.minutes is None:
        yield from range(settings.count or gate.each_commit)
        return
    number = 0
    while time.monotonic() - begun_s < 60 * settings.minutes:
        yield from range(number, number + INPUTS_PER_LOOK)
        number += INPUTS_PER_LOOK
