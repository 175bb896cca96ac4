import pytest

from interceptors.errors import CollectionNotFound, PartitionNotFound, SchemaMismatch
from interceptors.shard.catalog import DEFAULT_PARTITION, Catalog, CollectionInfo
from wal.errors import AlreadyExists, InvalidArgument
from wal.headers import (
    CreateCollectionHeader,
    CreatePartitionHeader,
    DropCollectionHeader,
    DropPartitionHeader,
)

CREATE = CreateCollectionHeader(
    1, "orders", b"schema", 3, "id", ("p0_1v0", "p0_1v1"), ((2, DEFAULT_PARTITION),)
)
ROWS = (1, 2, 3)
"""Collection, partition and schema version of rows that fit."""


def catalog(*partitions: CreatePartitionHeader) -> Catalog:
    made = Catalog()
    made.create_collection(CREATE, tick=10)
    for header in partitions:
        made.create_partition(header, tick=11)
    return made


def other(number: int = 7, name: str = "other", **fields: object) -> CreateCollectionHeader:
    defaults = {
        "schema": b"",
        "schema_version": 1,
        "primary_key": "id",
        "vchannels": (f"p0_{number}v0",),
    }
    partitions = ((number + 1, DEFAULT_PARTITION),)
    return CreateCollectionHeader(number, name, **({"partitions": partitions} | defaults | fields))  # type: ignore[arg-type]


def test_collection_is_found_by_name_and_by_id() -> None:
    info = catalog().collection_by_name("orders")
    assert info is catalog().collections()[0] or info == catalog().collection(1)
    assert info.partition_by_name(DEFAULT_PARTITION).id == 2
    assert (info.created_tick, info.dropped_tick) == (10, 0)


def test_change_of_one_partition_does_not_go_over_all_others() -> None:
    class Counting(dict[tuple[str, int], tuple[int, int]]):
        changes = 0

        def __setitem__(self, key: tuple[str, int], value: tuple[int, int]) -> None:
            self.changes += 1
            super().__setitem__(key, value)

        def pop(self, key: tuple[str, int], default: object = None) -> None:  # type: ignore[override]
            self.changes += 1
            super().pop(key, None)

    made = catalog(*[CreatePartitionHeader(1, number, f"p{number}") for number in range(3, 53)])
    made._writable = counted = Counting(made._writable)
    made.create_partition(CreatePartitionHeader(1, 60, "one more"), tick=20)
    assert counted.changes == len(CREATE.vchannels)
    assert made.drop_partition(DropPartitionHeader(1, 30), tick=21)
    assert counted.changes == 2 * len(CREATE.vchannels)
    writable = [number for number in range(2, 61) if made.is_writable("p0_1v1", number)]
    assert writable == [*range(2, 30), *range(31, 53), 60]


def test_schema_is_kept_after_the_drop() -> None:
    made = catalog()
    made.drop_collection(DropCollectionHeader(1), tick=20)
    assert (made.collection(1).schema_version, made.collection(1).schema) == (3, b"schema")
    with pytest.raises(CollectionNotFound):
        made.collection(9)


@pytest.mark.parametrize(
    "header, error",
    [
        (other(name="orders"), AlreadyExists),
    ],
    ids=["name"],
)
def test_collection_that_does_not_fit_is_refused(
    header: CreateCollectionHeader, error: type[Exception]
) -> None:
    with pytest.raises(error):
        catalog().check_create_collection(header)


def test_name_is_free_again_after_the_drop_and_the_ids_stay_apart() -> None:
    made = catalog()
    made.drop_collection(DropCollectionHeader(1), tick=20)
    header = other(name="orders")
    made.check_create_collection(header)
    made.create_collection(header, tick=30)
    assert made.collection_by_name("orders").id == 7
    assert made.collection(1).dropped_tick == 20
    assert [info.id for info in made.collections()] == [7]
    assert [info.id for info in made.collections(dropped=True)] == [1, 7]


@pytest.mark.parametrize(
    "header, error",
    [
        (CreatePartitionHeader(9, 5, "eu"), CollectionNotFound),
        (CreatePartitionHeader(1, 5, DEFAULT_PARTITION), AlreadyExists),
    ],
    ids=["no collection", "name"],
)
def test_partition_that_does_not_fit_is_refused(
    header: CreatePartitionHeader, error: type[Exception]
) -> None:
    with pytest.raises(error):
        catalog().check_create_partition(header)


@pytest.mark.parametrize(
    "header, error",
    [
        (DropPartitionHeader(9, 2), CollectionNotFound),
        (DropPartitionHeader(1, 5), PartitionNotFound),
        (DropPartitionHeader(1, 2), InvalidArgument),
    ],
    ids=["no collection", "no partition", "default"],
)
def test_partition_that_may_not_be_dropped_stays(
    header: DropPartitionHeader, error: type[Exception]
) -> None:
    with pytest.raises(error):
        catalog().check_drop_partition(header)


@pytest.mark.parametrize(
    "rows, error",
    [((9, 2, 3), CollectionNotFound), ((1, 5, 3), PartitionNotFound), ((1, 2, 2), SchemaMismatch)],
    ids=["collection", "partition", "schema version"],
)
def test_insert_that_does_not_fit_is_refused(
    rows: tuple[int, int, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        catalog().check_insert("p0_1v0", *rows)


def test_rows_are_welcome_on_every_vchannel_until_the_partition_is_dropped() -> None:
    made = catalog(CreatePartitionHeader(1, 5, "eu"))
    eu = (1, 5, 3)
    for vchannel in CREATE.vchannels:
        made.check_insert(vchannel, *ROWS)
        made.check_insert(vchannel, *eu)
    made.drop_partition(DropPartitionHeader(1, 5), tick=20)
    made.check_insert("p0_1v1", *ROWS)
    with pytest.raises(PartitionNotFound):
        made.check_insert("p0_1v1", *eu)


def test_nothing_may_be_written_to_a_dropped_collection() -> None:
    made = catalog()
    made.drop_collection(DropCollectionHeader(1), tick=20)
    with pytest.raises(CollectionNotFound):
        made.check_insert("p0_1v0", *ROWS)
    with pytest.raises(CollectionNotFound):
        made.check_delete("p0_1v0", 1)
    with pytest.raises(CollectionNotFound):
        made.live(1)


def test_parts_of_one_message_take_effect_once() -> None:
    made = catalog(CreatePartitionHeader(1, 5, "eu"))
    assert not made.create_collection(CREATE, tick=10)
    before = made.collections()
    made.create_partition(CreatePartitionHeader(1, 5, "eu"), tick=11)
    assert made.collections() == before
    assert made.drop_partition(DropPartitionHeader(1, 5), tick=20)
    assert not made.drop_partition(DropPartitionHeader(1, 5), tick=20)
    assert made.drop_collection(DropCollectionHeader(1), tick=21) is not None
    assert made.drop_collection(DropCollectionHeader(1), tick=21) is None


def test_forgetting_takes_only_what_was_dropped_before() -> None:
    made = catalog(CreatePartitionHeader(1, 5, "eu"))
    made.create_collection(other(), tick=12)
    made.drop_partition(DropPartitionHeader(1, 5), tick=20)
    made.drop_collection(DropCollectionHeader(7), tick=30)
    made.forget_below(30)
    assert [each.name for each in made.collection(1).partitions] == [DEFAULT_PARTITION]
    assert made.collection(7).dropped_tick
    made.forget_below(31)
    with pytest.raises(CollectionNotFound):
        made.collection(7)
    made.check_insert("p0_1v0", *ROWS)


def test_catalog_made_of_its_own_collections_is_the_same() -> None:
    made = catalog(CreatePartitionHeader(1, 5, "eu"))
    made.create_collection(other(), tick=12)
    made.drop_collection(DropCollectionHeader(7), tick=30)
    again = Catalog(made.collections(dropped=True))
    again.version = made.version  # how it came to what it is
    assert vars(again) == vars(made)
    assert isinstance(again.collection(7), CollectionInfo)
