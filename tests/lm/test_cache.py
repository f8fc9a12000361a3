"""The slot cache by itself: what is written is read, through growth, moves and compaction."""

import ctypes
import mmap
import sys

import pytest
import torch

from foretoken.lm.runtime import cache as cache_module
from foretoken.lm.runtime.cache import PARTS, Group, SlotCache

CPU = torch.device("cpu")
# heads, key dim, value dim of three layers: the last is of another kind
SHAPES = [(2, 4, 6), (2, 4, 6), (3, 5, 5)]


def states(layer, rows, width, start=0):
    """Keys and values that tell row, head and column apart."""
    heads, key, value = SHAPES[layer]
    index = torch.arange(rows * heads * width, dtype=torch.float32).view(rows, heads, width, 1)
    index = index + 1000 * start + 1
    return index.expand(-1, -1, -1, key) * 1.0, index.expand(-1, -1, -1, value) * -1.0


def write(cache, slots, starts, width, lows=None):
    """One forward's worth of updates; what each layer was given and what it returned."""
    cache.reserve(slots, [start + width for start in starts])
    cache.aim(slots, starts, width, max(starts) + width, lows or {}, CPU)
    given = [states(i, len(slots), width, start=starts[0]) for i in range(3)]
    return given, [cache.update(*own, i) for i, own in enumerate(given)]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_a_row_is_read_back_and_grows():
    cache = SlotCache(3, slots=1, columns=4)
    written = [[], [], []]
    for start, width in ((0, 3), (3, 1), (4, 9), (13, 2)):
        given, read = write(cache, [0], [start], width)
        for i in range(3):
            written[i].append(given[i])
            for side in (0, 1):
                expected = torch.cat([pair[side] for pair in written[i]], dim=2)
                assert torch.equal(read[i][side], expected)
    assert cache.columns == 16 and len(cache.groups) == 2  # two kinds of layers
    assert read[0][0].data_ptr() == cache.groups[0].keys[0].data_ptr()  # a view, not a copy


def test_ragged_rows_in_neighbouring_slots_are_views():
    cache = SlotCache(3, slots=1, columns=4)
    write(cache, [0], [0], 5)
    write(cache, [1], [0], 2)
    write(cache, [2], [0], 3)
    given, read = write(cache, [1, 2], [2, 3], 2)
    for i in range(3):
        assert torch.equal(read[i][0][0, :, 2:4], given[i][0][0])
        assert torch.equal(read[i][0][1, :, 3:5], given[i][0][1])
        assert torch.equal(read[i][0][1, :, :3], states(i, 1, 3)[0][0])
        assert read[i][0].untyped_storage().data_ptr() in {
            group.keys.untyped_storage().data_ptr() for group in cache.groups
        }


def test_rows_with_a_gap_between_them_are_read_in_order():
    cache = SlotCache(3)
    for slot in range(3):
        write(cache, [slot], [0], slot + 1)
    given, read = write(cache, [0, 2], [1, 3], 1)
    assert read[0][0].shape[0] == 2
    assert torch.equal(read[0][0][0, :, 1], given[0][0][0, :, 0])
    assert torch.equal(read[0][0][1, :, 3], given[0][0][1, :, 0])
    assert torch.equal(read[0][0][1, :, :3], states(0, 1, 3)[0][0])


def test_a_path_is_compacted_in_place_and_neighbours_stay():
    cache = SlotCache(3)
    write(cache, [0], [0], 8)
    given, _ = write(cache, [1], [0], 8)
    cache.keep(1, 2, [0, 2, 3, 5])  # columns 2, 4, 5, 7
    cache.keep(0, 2, [0, 1, 2])  # nothing to move
    for i in range(3):
        assert torch.equal(cache.layers[i].keys[1, :, :6], given[i][0][0, :, [0, 1, 2, 4, 5, 7]])
        assert torch.equal(cache.layers[i].values[1, :, :6], given[i][1][0, :, [0, 1, 2, 4, 5, 7]])
        assert torch.equal(cache.layers[i].keys[0, :, :8], states(i, 1, 8)[0][0])


@pytest.mark.parametrize(("source", "target"), [(0, 3), (0, 6), (4, 1), (2, 2)])
def test_columns_move_together_and_neighbours_stay(source, target):
    cache = SlotCache(3, columns=16)
    write(cache, [0], [0], 8)
    given, _ = write(cache, [1], [0], 12)
    cache.shift(1, source, target, 5)
    for i in range(3):
        layer, (keys, values) = cache.layers[i], given[i]
        assert torch.equal(layer.keys[1, :, target : target + 5], keys[0, :, source : source + 5])
        assert torch.equal(layer.values[1, :, target : target + 5], values[0, :, source:][:, :5])
        assert torch.equal(layer.keys[0, :, :8], states(i, 1, 8)[0][0])


def test_a_row_moves_into_a_freed_slot():
    cache = SlotCache(3)
    write(cache, [0], [0], 2)
    given, _ = write(cache, [1], [0], 5)
    cache.move(1, 0)
    for i in range(3):
        assert torch.equal(cache.layers[i].values[0, :, :5], given[i][1][0])


def test_windowed_layers_read_from_their_first_visible_column():
    cache = SlotCache(3)
    given, read = write(cache, [0], [0], 8, lows={1: 5})
    assert torch.equal(read[1][0], given[1][0][:, :, 5:]) and read[0][0].shape[2] == 8


def test_unwritten_columns_are_zero():
    """A masked column still takes part as zero times its value: a NaN there would spread."""
    cache = SlotCache(3, slots=1, columns=4)
    write(cache, [0], [0], 3)
    cache.reserve(range(4), [100] * 4)
    for group in cache.groups:
        assert not group.keys[:, 1:].any() and not group.values[:, :, :, 3:].any()


def held(cache):
    """Bytes of all buffers."""
    return sum(group.keys.nbytes + group.values.nbytes for group in cache.groups)


def filled(layers, slots, columns):
    """A cache of a granted size whose rows are written."""
    cache = SlotCache(layers)
    cache.grant(slots, columns)
    for slot in range(slots):
        cache.used = slot + 1
        cache.reserve([slot], [columns])
        cache.aim([slot], [0], columns, columns, {}, CPU)
        for layer in range(layers):
            keys = torch.arange(2.0 * columns * 4).view(1, 2, columns, 4) + 7 * slot + layer
            cache.update(keys, -keys, layer)
    cache.reserve(range(slots), [columns] * slots)
    return cache


def resident(stretches):
    """Bytes of these stretches of pages that lie in memory, by the system's own count."""
    total = 0
    for pages in stretches:
        size = len(pages.memory)
        seen = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        place = torch.frombuffer(pages.memory, dtype=torch.uint8).data_ptr()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), seen) == 0
        total += sum(one & 1 for one in seen) * mmap.PAGESIZE
    return total


def pages_of(cache):
    return [pages for group in cache.groups for pages in group.pages]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep pages until the end")
def test_memory_follows_the_rows_own_lengths_and_goes_with_them():
    """Of eight slots of 4,096 columns, two rows hold a hundred and two thousand."""
    cache = SlotCache(2, slots=8, columns=4096)
    lengths = {0: 100, 5: 2000}
    states = {slot: torch.ones(1, 2, length, 64) for slot, length in lengths.items()}
    for slot, length in lengths.items():
        cache.reserve([slot], [length])
        cache.aim([slot], [0], length, length, {}, CPU)
        for layer in range(2):
            cache.update(states[slot], states[slot], layer)
    cache.reserve([0], [100])  # layers share their buffers from here on
    whole, column = held(cache), 2 * 2 * 2 * 64 * 4
    pages = 2 * 2 * 2 * 2 * 2 * 4096  # at both ends of each stretch of a slot
    assert whole == 8 * 4096 * column
    assert 2100 * column <= resident(pages_of(cache)) <= 2100 * column + pages
    cache.reserve([0], [5000])  # growth copies what is filled, and no more
    assert cache.columns == 8192
    assert 2100 * column <= resident(pages_of(cache)) <= 2100 * column + pages
    cache.move(5, 1)
    cache.vacate(5)
    assert resident(pages_of(cache)) <= 2100 * column + pages
    cache.reserve([2], [100])
    cache.aim([2], [0], 100, 100, {}, CPU)
    for layer in range(2):
        cache.update(states[0], states[0], layer)
    cache.move(2, 1)  # a short row in the place of a long one
    cache.vacate(2)
    assert resident(pages_of(cache)) <= 200 * column + 2 * pages
    for layer in range(2):
        assert all(torch.equal(kept, states[0][0]) for kept in cache.kept(layer, 1, 100))
    cache.vacate(1)
    assert resident(pages_of(cache)) <= 100 * column + pages
    for group in cache.groups:
        assert not group.keys[:, 2:].any(), "zero again, as masked columns have to be"


def test_a_granted_size_is_the_size():
    cache = filled(5, 3, 70)
    assert (cache.slots, cache.columns) == (3, 80) and cache.in_place
    assert held(cache) == 2 * 5 * 3 * 2 * 80 * 4 * 4
    assert cache.takes(80) and not cache.takes(81)
    cache.reserve(range(4), [130] * 4)  # who asks for more gets that, and no more
    assert (cache.slots, cache.columns) == (4, 144)


def test_a_new_grant_keeps_used_rows_and_gives_back_the_rest():
    cache = filled(5, 3, 70)
    before = [[part.clone() for part in cache.kept(layer, 1, 70)] for layer in range(5)]
    cache.used = 2
    cache.grant(2, 200)
    assert cache.slots == 3, "not before the next forward"
    cache.reserve(range(2), [71] * 2)
    assert (cache.slots, cache.columns) == (2, 208)
    for layer in range(5):
        for part, old in zip(cache.kept(layer, 1, 70), before[layer], strict=True):
            assert torch.equal(part, old)
    cache.used = 0
    cache.grant(1, 10)
    cache.reserve([0], [1])
    assert held(cache) == 2 * 5 * 1 * 2 * 16 * 4 * 4


def test_a_new_grant_makes_room_for_rows_that_came_since():
    cache = filled(3, 4, 70)
    before = [part.clone() for part in cache.kept(1, 3, 70)]
    cache.used = 5  # the fifth has a slot, and nothing was written for it yet
    cache.grant(5, 200)
    cache.reserve(range(5), [71] * 5)
    assert (cache.slots, cache.columns) == (5, 208)
    assert all(torch.equal(*pair) for pair in zip(cache.kept(1, 3, 70), before, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep pages until the end")
def test_growth_never_holds_two_whole_caches(monkeypatch):
    """What old and new buffers hold together, whenever a layer's memory was given back."""
    layers = 16
    cache = filled(layers, 2, 2048)
    before, give_back, most = resident(pages_of(cache)), Group.give_back, []
    old, blank, new = pages_of(cache), cache.blank, []

    def noted(*given):
        made = blank(*given)
        new.extend(made.pages)
        return made

    def noting(group, layer, slot=None):
        give_back(group, layer, slot)
        most.append(resident([*old, *new]))

    monkeypatch.setattr(cache, "blank", noted)
    monkeypatch.setattr(Group, "give_back", noting)
    cache.grant(2, 4096)
    cache.reserve(range(2), [2100] * 2)
    assert held(cache) == 2 * layers * 2 * 2 * 4096 * 4 * 4 and len(most) == layers
    assert max(most) <= held(cache) + before // layers


@pytest.mark.parametrize("layers", [5, 40])
def test_devices_without_pages_get_their_buffers_one_by_one(layers, monkeypatch):
    monkeypatch.setattr(cache_module, "zeros", lambda shape, like: (like.new_zeros(*shape), None))
    cache = SlotCache(layers)
    cache.grant(2, 100)
    for _ in range(2):
        cache.reserve([0, 1], [64] * 2)
        cache.aim([0, 1], [0, 0], 64, 64, {}, CPU)
        for layer in range(layers):
            keys = torch.ones(2, 2, 64, 4, device="meta")
            cache.update(keys, keys, layer)
    assert len(cache.groups) == -(-layers // -(-layers // PARTS)) and cache.in_place


def test_layers_keep_their_columns_where_they_compute():
    cache = SlotCache(2)
    cache.reserve(range(2), [8] * 2)
    cache.aim([0, 1], [0, 2], 3, 5, {}, CPU)
    for layer, device in enumerate(("cpu", "meta")):
        keys = torch.ones(2, 2, 3, 4, device=device)
        read, _ = cache.update(keys, keys, layer)
        assert read.device.type == device
    cache.reserve(range(2), [9] * 2)
    assert [group.keys.device.type for group in cache.groups] == ["cpu", "meta"]
    assert cache.rows_of[1].keys.shape == (2, 2, 256, 4) or cache.columns == 128


def test_a_growth_without_memory_leaves_what_there_is(monkeypatch):
    """Who asks for more fails, and others read, compact and grow as before."""
    cache = SlotCache(3, slots=1, columns=4)
    write(cache, [0], [0], 1)
    given, _ = write(cache, [0], [1], 2)
    zeros, made = cache_module.zeros, []

    def scarce(shape, like):
        made.append(shape)
        if len(made) == 3:  # the first kind of layers has got its new buffers
            raise MemoryError("no room")
        return zeros(shape, like)

    monkeypatch.setattr(cache_module, "zeros", scarce)
    with pytest.raises(MemoryError, match="no room"):
        cache.reserve([0, 1], [3, 90])
    monkeypatch.undo()
    assert (cache.slots, cache.columns) == (1, 4) and len(cache.groups) == 2
    _, read = write(cache, [0], [3], 1)
    for i in range(3):
        assert torch.equal(read[i][0][:, :, 1:3], given[i][0])
    cache.keep(0, 1, [1])
    _, read = write(cache, [0, 1], [2, 0], 9)
    for i in range(3):
        assert torch.equal(read[i][0][0, :, 1], given[i][0][0, :, 1])
        assert torch.equal(read[i][1][0, :, 1], given[i][1][0, :, 1])


def test_a_row_without_a_buffer_has_nothing_that_was_kept():
    cache = SlotCache(3, slots=1, columns=4)
    write(cache, [0], [0], 2)
    assert cache.kept(0, 0, 2) is not None and cache.kept(0, 1, 0) is None


def test_a_row_that_was_never_fed_moves_into_an_empty_slot():
    cache = SlotCache(3, slots=1, columns=4)
    cache.grant(1, 16)  # all of it is held, so that what nobody needs is zeroed
    write(cache, [0], [0], 3)
    cache.move(1, 0)
    assert cache.filled[0] == 0
    assert not any(group.keys[:, 0].any() or group.values[:, 0].any() for group in cache.groups)
